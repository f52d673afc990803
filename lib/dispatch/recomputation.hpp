#pragma once

#include <cstdint>

namespace fsdp {

/// Note [Recomputation]
/// An activation checkpoint runs a part of forward again inside a backward. For what is gathered
/// and released that is a use in the backward like any other: it is learned, prefetched and counted
/// there. For what operators compute it is forward: their operands are cast as they were. So the
/// thread that recomputes says for which autograd task; a backward that the recomputed function
/// itself runs is another task, and is no forward.
namespace detail {
inline constexpr int64_t kNoTask = -2;
inline thread_local int64_t recomputing_task = kNoTask;
}  // namespace detail

/// True if operators on this thread, whose autograd task is `task` (-1: none), are those of a
/// forward.
inline bool runs_forward(int64_t task) { return task == -1 || task == detail::recomputing_task; }

/// While it lives, operators in autograd task `task` on this thread are a forward's.
class RecomputationGuard {
 public:
  explicit RecomputationGuard(int64_t task) : outer_(detail::recomputing_task) {
    detail::recomputing_task = task;
  }
  ~RecomputationGuard() { detail::recomputing_task = outer_; }
  RecomputationGuard(const RecomputationGuard&) = delete;
  RecomputationGuard& operator=(const RecomputationGuard&) = delete;

 private:
  int64_t outer_;
};

}  // namespace fsdp
