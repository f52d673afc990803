#pragma once

namespace fsdp {

/// Who shows a root's sharded parameters and their gradients in a form of its own, as the Python extension
/// does, and so has to carry values between the two. Called on the thread that runs the step, under the
/// root's lock: it starts no operator on an unsharded parameter.
class StepFollower {
 public:
  virtual ~StepFollower() = default;
  /// A step, or a backward, begins: what the user has changed since (gradients dropped, requires_grad) is to be
  /// on the sharded parameters when this returns. May throw; the step has not begun then.
  virtual void take_over() = 0;
  /// A backward, a step or a scope has ended, well or not. Gradients are on the sharded parameters unless
  /// their reduction is still under way.
  virtual void show() = 0;
};

}  // namespace fsdp
