#pragma once

#include <memory>
#include <vector>

#include "fsdp/custom_comm.hpp"
#include "group/gather/encoded_gather.hpp"
#include "group/gather/prepared_extension.hpp"
#include "group/group_parts.hpp"

namespace fsdp {

/// In which form a group's parameters travel, and through what: as they lie in this rank's shard; or packed in one
/// buffer, where an extension encodes one of them or a user's own collective gathers them.
class AllGatherInputs {
 public:
  explicit AllGatherInputs(Extensions extensions);

  /// dtypes: that the parameters are kept in. Throws UsageError where an extension does not take its parameter.
  void check(const GroupParts& parts, const std::vector<at::ScalarType>& dtypes) const;
  /// The packed buffer of a group that is laid out so; null: it travels as it lies. Throws as `check`; changes nothing.
  std::unique_ptr<EncodedGather> plan(const GroupParts& parts, const GroupLayout& layout,
                                      std::vector<at::ScalarType> dtypes) const;
  /// What is sent of the parameters, and through what; custom: null is the communicator's own collective.
  struct Terms {
    Extensions extensions;
    const AllGatherComm* custom = nullptr;
  };
  Terms terms() const { return {extensions_, custom_.get()}; }
  /// What `plan` gives on other terms.
  static std::unique_ptr<EncodedGather> plan_with(Terms terms, const GroupParts& parts, const GroupLayout& layout,
                                                  std::vector<at::ScalarType> dtypes);
  void set_encoded(std::unique_ptr<EncodedGather> encoded) { encoded_ = std::move(encoded); }
  /// Null: as it lies in the shard.
  const EncodedGather* encoded() const { return encoded_.get(); }

  /// Counts from the next gather on; the group is released. Goes with what `plan_with` has made for it.
  void set_custom(std::shared_ptr<AllGatherComm> comm) { custom_ = std::move(comm); }
  const std::shared_ptr<AllGatherComm>& custom() const { return custom_; }

  /// Encodes parameter `index` from the next `plan` on; null: it travels as its values, or belongs to another group.
  void set_extension(size_t index, std::shared_ptr<AllGatherExtension> extension);

  /// Lets extensions make what they send, before a gather. Returns the packed buffer if that is another now; null: it is
  /// as it was.
  std::unique_ptr<EncodedGather> prepare(const GroupParts& parts) const;
  /// The group is released.
  void release() const noexcept;

 private:
  void find_prepared();

  Extensions extensions_;                     // by parameter
  std::vector<PreparedExtension*> prepared_;  // those among them
  std::shared_ptr<AllGatherComm> custom_;
  std::unique_ptr<EncodedGather> encoded_;
};

/// The dtypes that the parameters are kept in.
std::vector<at::ScalarType> stored_dtypes(const GroupParts& parts);

/// This rank's rows where they are gathered from, 1-D bytes; undefined where each is memory of its own. Copied from the
/// host where they are offloaded; may_overlap: it need not wait.
at::Tensor shard_on_device(GroupParts& parts, bool may_overlap);

/// What this rank sends of a group that travels as it lies: those rows in the dtypes and in the order that are gathered.
at::Tensor gather_input(GroupParts& parts, bool may_overlap);

}  // namespace fsdp
