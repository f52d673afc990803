#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <vector>

namespace fsdp {

class GradientDtypes;
struct FSDPParam;

/// The gradients of one group until a reduction takes them: which have arrived in the backward under way, and what waits for a
/// later one, on the unsharded parameters and as sums. Whole gradients have the parameter's sizes.
///
/// Not thread-safe: the root's lock guards it.
class GradientStore {
 public:
  /// params: the group's, `count` of them when the group is made. They outlive this.
  GradientStore(std::vector<FSDPParam>& params, size_t count) : params_(params), params_gradients_(count) {}

  // --- the backward under way
  /// Autograd has accumulated the gradient of parameter `index`.
  void arrived(size_t index);
  /// True once every parameter that is expected to get a gradient has it: all `trainable` ones, or those that got one in
  /// the last backward (others stay unused, mostly for good).
  bool is_complete(size_t trainable) const;
  /// The group's gradients go into a reduction.
  void note_reduced() { is_reduced_ = true; }
  bool is_reduced() const { return is_reduced_; }
  /// It is over: what got gradients is what the next one expects.
  void end_backward();
  /// As after one, and nothing is expected.
  void reset();

  // --- what no reduction has taken
  /// HSDP without all-reduce: this rank's rows, summed within the shard group so far, in the reduce dtype; undefined if none.
  at::Tensor& partial_sum(size_t index) { return params_gradients_[index].partial_sum; }
  /// Sum of whole gradients of backwards without reduction, in the reduce dtype where that is not the unsharded parameter's;
  /// undefined if there is none.
  at::Tensor& accumulated(size_t index) { return params_gradients_[index].accumulated; }
  const at::Tensor& partial_sum(size_t index) const { return params_gradients_[index].partial_sum; }
  const at::Tensor& accumulated(size_t index) const { return params_gradients_[index].accumulated; }
  bool has_partial_sums() const;
  /// The whole gradient since the last reduction, taken off the unsharded parameter and the sum; undefined if there is none.
  at::Tensor take(size_t index);
  /// What `take` allocates: before the CPU's kernel adds a gradient to a sum of another dtype, it casts all of it.
  int64_t bytes_to_take(size_t index) const;
  /// `stream` is about to use all of it, and it may be another stream's memory.
  void record_use(c10::Stream stream) const;
  /// An unsharded parameter holds a gradient, or a sum waits.
  bool has_unreduced(bool counts_partial_sums) const;
  /// After a backward without reduction: adds the unsharded parameters' gradients up in the reduce dtype, if that is another
  /// one than theirs. Else they stay where autograd adds to them.
  void accumulate(const GradientDtypes& dtypes);
  /// Drops all of it.
  void drop();

 private:
  struct ParamGradients {  // of one parameter
    bool has_arrived = false;
    bool is_expected = false;  // arrived in the last backward
    at::Tensor partial_sum = {}, accumulated = {};
  };

  std::vector<FSDPParam>& params_;
  std::vector<ParamGradients> params_gradients_;
  size_t arrived_ = 0;       // parameters
  size_t expected_ = 0;      // parameters; 0: not learned yet
  size_t as_expected_ = 0;   // parameters that arrived and were expected
  bool is_reduced_ = false;  // in this backward
};

}  // namespace fsdp
