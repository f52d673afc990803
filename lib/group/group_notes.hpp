#pragma once

#include "param/left_storage.hpp"

namespace fsdp {

class ParamGroup;

/// What a group says in the log when a step begins: not before, as its parameters get their full names, and others give up
/// what they share, only when everything is sharded.
class GroupNotes {
 public:
  /// The memory that its parameters were views of.
  LeftStorages& left() { return left_; }
  /// Which parameters are trained: there may be something new to say.
  void trainable_changed() { is_due_ = true; }
  /// Each thing once.
  void say(const ParamGroup& group) {
    if (is_due_) [[unlikely]]
      say_all(group);
  }

 private:
  void say_all(const ParamGroup& group);

  LeftStorages left_;
  bool is_due_ = false;
};

}  // namespace fsdp
