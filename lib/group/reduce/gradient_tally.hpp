#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp {

/// Which parameters of a group have their gradient in the backward under way, and which sums wait
/// for a later one. One per group; the root's lock guards it.
class GradientTally {
 public:
  explicit GradientTally(size_t params) : has_(params, false), partial_sums_(params), accumulated_(params) {}

  /// Autograd has accumulated the gradient of parameter `index`.
  void note(size_t index);
  /// True once every parameter that is expected to get a gradient has it: all `trainable` ones, or those
  /// that got one in the last backward (others stay unused, mostly for good).
  bool is_complete(size_t trainable) const;
  /// The backward is over: what got gradients is what the next one expects.
  void end_backward();
  void reset();

  /// The group's gradients went into a reduction in this backward.
  bool is_reduced = false;

  /// HSDP without all-reduce: this rank's rows, summed within the shard group so far; undefined if none.
  at::Tensor& partial_sum(size_t index) { return partial_sums_[index]; }
  /// Gradients of backwards without reduction, in the reduce dtype where that is not the handle's;
  /// undefined if there are none.
  at::Tensor& accumulated(size_t index) { return accumulated_[index]; }

 private:
  std::vector<bool> has_;       // by parameter: in this backward
  std::vector<bool> expected_;  // by parameter: in the last one; empty: not learned yet
  size_t count_ = 0, expected_count_ = 0;
  std::vector<at::Tensor> partial_sums_, accumulated_;
};

}  // namespace fsdp
