#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <vector>

namespace fsdp {

/// Note [Hooks of gradient accumulators]
/// A user may hang hooks on the node that accumulates a parameter's gradient: an optimizer in backward, a reducer of his own.
/// In plain LibTorch the last of them run when the gradient is on the parameter. Here autograd has a node of the unsharded
/// tensor alone, and what that accumulates is of one rank: the parameter's gradient comes later. So hooks behind that node are
/// taken off while autograd runs it and put back when they have run, behind the reduction. One that LibTorch has made for the
/// DTensor, which autograd never runs, has its hooks run there, too.

/// Keeps and runs the hooks on one parameter's accumulators. Not thread-safe, like the parameter's tensors.
class AccumulatorHooks {
 public:
  using Weak = decltype(torch::autograd::AutogradMeta::grad_accumulator_);
  using Gradients = torch::autograd::variable_list;

  /// Takes the post hooks off the unsharded tensor's accumulator, which autograd runs: they wait from now on.
  void defer(const Weak& accumulator);
  /// Looks in the registered tensor's metadata for the accumulator that a user has asked it for, and keeps it, unless it is the
  /// unsharded tensor's.
  void note(const torch::autograd::AutogradMeta& registered, const c10::TensorImpl* tensor);

  /// False: nobody has ever had one of the registered tensor's, or all have let go of theirs.
  bool knows_any() const { return !own_.empty() || !deferred_.empty(); }
  /// True if there is anything to run; after `note`.
  bool has_any() const;
  /// Runs the hooks in front of the gradient that is to be added, and returns it, or what hooks have made of it.
  at::Tensor run_before(at::Tensor gradient) const;
  /// Runs the hooks behind the gradient that was added, also those that wait, which are put back.
  void run_behind(const at::Tensor& gradient);

 private:
  struct Deferred {
    Weak accumulator;
    std::vector<std::unique_ptr<torch::autograd::FunctionPostHook>> hooks;
  };
  std::vector<Deferred> deferred_;
  std::vector<Weak> own_;  // the registered tensor's; while somebody has them
};

}  // namespace fsdp
