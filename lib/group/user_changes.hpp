#pragma once

#include <cstddef>

#include "group/group_parts.hpp"
#include "group/notes/group_notes.hpp"
#include "group/reduce/group_gradients.hpp"

namespace fsdp {

/// What users, and their optimizers, change of a group's parameters: values, `requires_grad`, `grad_dtype`, the tensors
/// themselves. The group takes it over here; when, is its root's business.
///
/// Not thread-safe: the root's lock guards it.
class UserChanges {
 public:
  /// All outlive this.
  UserChanges(GroupParts& parts, GroupGradients& gradients, GroupNotes& notes)
      : parts_(parts), gradients_(gradients), notes_(notes) {}

  /// Finds what no operator showed: replaced storages, tensors and members. Mends or throws.
  void validate();

  // --- values
  /// Sharded parameter `index`, or the local shard behind those, has been written. Whoever writes past operators tells the
  /// owner of it (ParamOwner::note_write), which also makes the next use look.
  void note_write(size_t index);
  /// True if a sharded parameter has been written since the gather that the unsharded parameters show (or the last one, if
  /// they show nothing).
  bool is_stale() const { return is_outdated_ || parts_.has_writes(); }
  /// Same values in unsharded parameters and sharded parameters from now on, wherever they came from.
  void sync_versions();
  /// Puts replaced storages back and follows versions: in front of a gather of a stale group, and instead of it where
  /// nothing is ever released.
  void refresh() {
    validate();
    sync_versions();
  }
  /// Does so in front of a gather, which shows the new values from then on. Returns whether there were any.
  bool refresh_before_gather();

  // --- settings
  void sync_requires_grad();
  /// Does that in front of a change of the group, whatever has been handed out.
  void take_over_requires_grad();
  void sync_grad_dtypes();
  /// Anew, after what may have changed `requires_grad` in another way.
  void count_trainable();

 private:
  void close_left();

  GroupParts& parts_;
  GroupGradients& gradients_;
  GroupNotes& notes_;
  bool is_outdated_ = false;  // versions have been followed since the last gather, values not
};

}  // namespace fsdp
