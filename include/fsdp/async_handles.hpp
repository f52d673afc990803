#pragma once

#include <cstdint>
#include <memory>
#include <utility>

namespace fsdp {

class ModuleState;  // lib/module: what is attached to a sharded module

/// The result of `unshard_async`. After wait() the parameters are unsharded. Waiting twice is free.
class UnshardHandle {
 public:
  UnshardHandle() = default;
  explicit UnshardHandle(std::shared_ptr<ModuleState> state) : state_(std::move(state)) {}
  void wait();

 private:
  std::shared_ptr<ModuleState> state_;
};

/// The result of `finalize_backward_async`. After wait() the gradients are complete.
class GradientReductionHandle {
 public:
  GradientReductionHandle() = default;
  GradientReductionHandle(std::shared_ptr<ModuleState> root, int64_t ticket)
      : root_(std::move(root)), ticket_(ticket) {}
  /// Waiting twice is free. Throws StateError if `reset_iter_state` has dropped the reduction, CommError if
  /// it failed.
  void wait();

 private:
  std::shared_ptr<ModuleState> root_;  // null: nothing to wait for
  int64_t ticket_ = 0;
};

}  // namespace fsdp
