#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "fsdp/api.hpp"

namespace fsdp {

class ModuleState;  // of the library

/// The result of `unshard_async`. After wait() the parameters are unsharded. Waiting twice is free.
class FSDP_API UnshardHandle {
 public:
  class Inner;  // of the library

  UnshardHandle() = default;
  void wait();

 private:
  explicit UnshardHandle(std::shared_ptr<ModuleState> state) : state_(std::move(state)) {}

  std::shared_ptr<ModuleState> state_;
};

/// The result of `finalize_backward_async`. After wait() the gradients are complete.
class FSDP_API GradientReductionHandle {
 public:
  class Inner;  // of the library

  GradientReductionHandle() = default;
  /// Waiting twice is free. Throws StateError if `reset_iter_state` has dropped the reduction, CommError if
  /// it failed.
  void wait();

 private:
  GradientReductionHandle(std::shared_ptr<ModuleState> root, int64_t ticket)
      : root_(std::move(root)), ticket_(ticket) {}

  std::shared_ptr<ModuleState> root_;  // null: nothing to wait for
  int64_t ticket_ = 0;
};

}  // namespace fsdp
