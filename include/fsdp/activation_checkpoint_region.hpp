#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/api.hpp"

// A part of fsdp/activation_checkpoint.hpp: the code that does not depend on the function's types.
namespace fsdp {

/// How `activation_checkpoint` runs a function.
struct FSDP_API ActivationCheckpointOptions {
  /// True: the recomputation draws the same random numbers as forward, from the default generators of the CPU and of every
  /// device in use. Afterwards the generators continue as without it.
  bool preserve_rng_state = true;
  /// Other generators that the function uses, which are treated the same.
  std::vector<at::Generator> generators = {};
  /// Tensors that the function updates, such as running statistics, and that no later result depends on. The recomputation
  /// restores them. Those of a module's normalization layers need not be listed.
  std::vector<at::Tensor> buffers = {};
  /// True: the recomputation stops as soon as it has all tensors that backward needs. It stops by an exception that is no
  /// std::exception. False: it runs to the end of the function, for code that no exception may pass through.
  bool early_stop = true;
  /// The function's name in errors. Default: a module's class.
  std::string name = {};
};

namespace detail {

class CheckpointFrame;

/// How to run a checkpointed function once more.
struct FSDP_API Again {
  std::function<void(const std::vector<at::Tensor>& inputs)> run;
  const torch::nn::Module* module =
      nullptr;  ///< what it runs, if it is a module; kept alive by `run`
};

/// The forward of one checkpointed call. While it lives, tensors that autograd saves on this thread are not kept.
class FSDP_API CheckpointRegion {
 public:
  CheckpointRegion(const ActivationCheckpointOptions& options, std::vector<at::Tensor> inputs, Again again);
  /// Without `finish`, the call has ended with an exception, and its backward cannot run.
  ~CheckpointRegion();
  CheckpointRegion(const CheckpointRegion&) = delete;
  CheckpointRegion& operator=(const CheckpointRegion&) = delete;
  /// Call it when the function has returned. Throws UsageError if the function modified an input in place.
  void finish();

 private:
  class Active;
  std::shared_ptr<CheckpointFrame> frame_;
  std::unique_ptr<Active> active_;
  std::vector<at::Tensor> inputs_;
  std::vector<std::optional<int64_t>> versions_;  // by input; none: not watched
  bool is_finished_ = false;
};

}  // namespace detail

}  // namespace fsdp
