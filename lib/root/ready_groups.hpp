#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <span>

namespace fsdp {

class ParamGroup;

/// The groups of one root that operators may read without asking it: those of the last use, in one autograd task, on the
/// stream of that use. Each one's port has the flag, which operators look at without a lock (ParamOwner::is_ready).
///
/// Not thread-safe: the root's lock guards it. A port clears its own flag without it (GroupPort::note_write).
class ReadyGroups {
 public:
  /// These, and no others, from now on. task: as ParamOwner::is_ready has it.
  void set(std::span<ParamGroup* const> used, int64_t task);
  /// None is, at a boundary of a step or of a pass.
  void clear();
  /// The group is released, written, edited or gone.
  void drop(const ParamGroup& group);

 private:
  c10::SmallVector<const ParamGroup*, 4> ready_;
};

}  // namespace fsdp
