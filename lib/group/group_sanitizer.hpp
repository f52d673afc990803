#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "collectives/buffer.hpp"
#include "collectives/quarantine.hpp"
#include "fsdp/communicator.hpp"
#include "fsdp/sanitizer.hpp"

namespace fsdp {

struct GroupParts;
struct FSDPParam;

/// What FSDP_SANITIZE says; none without it.
std::optional<SanitizerOptions> sanitizer_of_environment();

/// The sanitizer mode's part of one group: it knows what the group's memory should hold.
///
/// Not thread-safe: the root's lock guards it.
class GroupSanitizer {
 public:
  /// rank: that faults name. device: where the group computes.
  GroupSanitizer(const SanitizerOptions& options, int rank, c10::Device device);
  /// Tells what else it finds: nobody is left to throw it.
  ~GroupSanitizer();

  const BufferGuard& guard() const { return guard_; }
  /// `inner` with late delivery, the same object for each call. group: its name, which sets the delays apart.
  Communicator& late(Communicator& inner, const std::string& group);

  /// The unsharded parameters are readable from now on.
  void note_shown(const at::Tensor& unsharded, std::vector<NamedBytes> params);
  /// An operator has written to parameter `index`.
  void note_write(const at::Tensor& unsharded, size_t index);
  /// They are about to be released: only operators may have written to them.
  void check_shown(const at::Tensor& unsharded);
  /// Checks this rank's parts, too; each operator's write has moved the parameter's version.
  void check_shards(std::span<const FSDPParam> params, std::span<const at::Tensor> pieces);

  /// Looks at what is in quarantine; gives all faults since the last call.
  std::vector<std::string> take_faults();

 private:
  struct Shown {
    NamedBytes param;
    uint64_t hash = 0;
  };
  struct Shard {
    uint64_t hash = 0;
    int64_t version = -1;  // at which it had that hash; none yet
  };

  SanitizerOptions options_;
  BufferGuard guard_;
  std::map<Communicator*, std::shared_ptr<Communicator>> late_;
  std::vector<Shown> shown_;
  std::vector<Shard> shards_;
  int rank_;
};

/// While it lives, buffers that this thread makes belong to the group: their bytes are counted, and they are guarded if
/// it is sanitized.
class GroupBuffers {
 public:
  /// what: they are, a literal: "gathered parameters".
  GroupBuffers(const GroupParts& group, const char* what);

 private:
  CountedBuffers counted_;
  std::optional<GuardedBuffers> guarded_;
};

}  // namespace fsdp
