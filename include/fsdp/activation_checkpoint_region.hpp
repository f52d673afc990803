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

// A part of fsdp/activation_checkpoint.hpp: what of a checkpointed call does not depend on its types.
namespace fsdp {

/// How `checkpoint` runs a function.
struct CheckpointOptions {
  /// The recomputation draws the random numbers that forward drew, from the default generators of
  /// the CPU and of every device in use; afterwards they go on as if it had not been.
  bool preserves_rng_state = true;
  /// Generators of the function's own that are treated alike.
  std::vector<at::Generator> generators = {};
  /// Tensors that the function updates and reads in no later result, such as running statistics:
  /// the recomputation leaves them as it found them. Those of a module's normalisations are known.
  std::vector<at::Tensor> buffers = {};
  /// The recomputation ends, by an exception of its own that no std::exception is, as soon as all
  /// that backward needs is there. False: it runs to the function's end, for code that an exception
  /// must not pass.
  bool stops_early = true;
  /// Names the function in errors. Default: a module's class.
  std::string name = {};
};

namespace detail {

class CheckpointFrame;

/// How to run a checkpointed function once more.
struct Again {
  std::function<void(const std::vector<at::Tensor>& inputs)> run;
  const torch::nn::Module* module =
      nullptr;  ///< what it runs, if it is a module; kept alive by `run`
};

/// The forward of one checkpointed call: while it lives, nothing that autograd saves on this thread
/// is kept.
class CheckpointRegion {
 public:
  CheckpointRegion(const CheckpointOptions& options, std::vector<at::Tensor> inputs, Again again);
  /// Without `finish`, the call ends with an exception: its backward cannot run.
  ~CheckpointRegion();
  CheckpointRegion(const CheckpointRegion&) = delete;
  CheckpointRegion& operator=(const CheckpointRegion&) = delete;
  /// The function has returned. Throws UsageError if it has modified an input in place.
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
