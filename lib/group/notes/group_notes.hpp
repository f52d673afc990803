#pragma once

#include <memory>
#include <utility>

#include "group/notes/optimizer_check.hpp"
#include "param/left_storage.hpp"
#include "trace/first_values.hpp"

namespace fsdp {

class ParamGroup;
struct GroupParts;

/// What a group says in the log when a step begins: not before, as its parameters get their full names, and others give up
/// what they share, only when everything is sharded. And what it has noted for that, and for the ranks to compare.
class GroupNotes {
 public:
  /// The memory that its parameters had before.
  LeftStorages& left() { return left_; }
  OptimizerCheck& optimizer() { return optimizer_; }
  /// Notes what ranks compare at the first step. The group is not attached yet: its parameters are whole here.
  void note_first_values(const GroupParts& parts);
  /// Returns what was noted. Null: nothing was, or it has been taken.
  std::unique_ptr<FirstValues> take_first_values() { return std::move(first_values_); }
  /// Notes that other parameters may be trained now: there may be something new to say.
  void trainable_changed() { is_due_ = true; }
  /// Puts off what is to be said until there is something new: a step is under way already, in which the parameters may have
  /// been used as plain ones.
  void put_off() { is_due_ = false; }
  /// Says what is to be said, each thing once.
  void say(const ParamGroup& group) {
    if (is_due_) [[unlikely]]
      say_all(group);
  }

 private:
  void say_all(const ParamGroup& group);

  LeftStorages left_;
  OptimizerCheck optimizer_;
  std::unique_ptr<FirstValues> first_values_;
  bool is_due_ = false;
};

}  // namespace fsdp
