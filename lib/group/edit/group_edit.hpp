#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "group/gather/encoded_gather.hpp"
#include "group/gather/prepared_extension.hpp"
#include "group/group_layout.hpp"
#include "group/edit/local_shards.hpp"
#include "group/param_dtypes.hpp"
#include "group/reduce/gradient_dtypes.hpp"

namespace fsdp {

class ParamGroup;

/// What is to change of where a group's rows lie, in what, and in which form they are gathered. Empty: stays.
struct GroupChange {
  std::optional<c10::Device> device = {};
  std::optional<at::ScalarType> dtype = {};         ///< that floating-point parameters are kept in
  std::optional<bool> computes_in_own_dtype = {};   ///< unsharded parameters are in their own dtype, or in the policy's
  std::vector<size_t> leaving = {};                 ///< parameters that another group takes over
  std::vector<size_t> parting = {};                 ///< parameters that leave memory which another one goes on in
  std::unique_ptr<LocalShards> classes = nullptr;   ///< this rank's rows lie in their order from now on, handed out as these
  /// Through what one parameter is gathered.
  struct Encoding {
    size_t index = 0;
    std::shared_ptr<PreparedExtension> extension;
  };
  std::optional<Encoding> encoding = {};
};

/// A change of a group that has all its memory and values, and has not happened: whatever may fail of it has been done. Who
/// holds one of the group's tensors keeps it.
class GroupEdit {
 public:
  /// Allocates, casts and copies; changes nothing of the group. From the meta device: shards of zeros. No communication. Throws
  /// UsageError where an extension does not take its parameter, or what an allocation throws.
  static GroupEdit prepare(const ParamGroup& group, GroupChange change);

  /// The group is so already.
  bool is_empty() const;
  /// group: as `prepare` had it, and released since. The one place that knows what follows from where rows lie.
  void commit(ParamGroup& group) &&;

 private:
  /// Undefined tensors: there is none.
  struct Gradients {
    std::vector<at::Tensor> sharded, unsharded, partial_sums, accumulated;  // by parameter
    std::vector<at::Tensor> of_classes;
  };

  GroupEdit(const GroupParts& parts, GroupChange change);
  bool is_leaving(size_t index) const;
  void lay_out(const GroupParts& parts);
  const GroupLayout& new_layout(const GroupParts& parts) const { return layout_ ? *layout_ : parts.layout; }
  bool moves_rows(const GroupParts& parts) const;
  void make_rows(const GroupParts& parts);
  void part_rows(const GroupParts& parts);
  void make_gradients(const ParamGroup& group);
  void make_sums(const ParamGroup& group);
  void commit_params(ParamGroup& group);
  void commit_form(ParamGroup& group);
  void commit_gradients(ParamGroup& group);

  GroupChange change_;
  c10::Device device_;
  ParamDtypes dtypes_;
  bool converts_ = false;  // values and gradients go to other dtypes, or another device
  bool recasts_ = false;   // unsharded parameters go to another dtype
  std::optional<GroupLayout> layout_;
  std::unique_ptr<EncodedGather> encoded_;
  at::Tensor shard_;                // undefined: each piece is memory of its own
  std::vector<at::Tensor> pieces_;  // empty: rows stay where they are
  Gradients gradients_;
  GradientDtypes::Plan reduced_in_;
};

}  // namespace fsdp
