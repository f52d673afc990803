#pragma once

#include <memory>
#include <utility>

#include "comm/watch/group_place.hpp"
#include "comm/watch/one_thread.hpp"

namespace fsdp {

/// While it lives the calling thread is in a collective of the group, and no other thread may be.
class ThreadInGroup {
 public:
  /// place: the group's. Throws ScheduleError where another thread is in the group: see refuse_two_threads.
  ThreadInGroup(Communicator& group, std::shared_ptr<GroupPlace> place, const OneThread::Use& use) : place_(std::move(place)) {
    if (const auto conflict = place_->threads().enter(use)) [[unlikely]]
      refuse_two_threads(group, *conflict);
  }
  ~ThreadInGroup() { place_->threads().leave(); }
  ThreadInGroup(const ThreadInGroup&) = delete;
  ThreadInGroup& operator=(const ThreadInGroup&) = delete;

 private:
  std::shared_ptr<GroupPlace> place_;
};

}  // namespace fsdp
