#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "collectives/reduce_scatter.hpp"
#include "group/gradient_division.hpp"
#include "group/step_observer.hpp"

namespace fsdp {

class ParamGroup;

/// Which parameters of a group have their gradient in the backward under way, and which sums wait
/// for a later one. One per group; the root's lock guards it.
class GradientTally {
 public:
  explicit GradientTally(size_t params) : has_(params, false), partial_sums_(params), accumulated_(params) {}

  /// Autograd has accumulated the gradient of parameter `index`.
  void note(size_t index);
  /// True once every parameter that is expected to get a gradient has it: all that need
  /// one, or those that got one in the last backward (others stay unused, mostly for good).
  bool is_complete(const ParamGroup& group) const;
  /// The backward is over: what got gradients is what the next one expects.
  void end_backward();
  void reset();

  /// HSDP without all-reduce: this rank's rows, summed within the shard group so far; undefined if none.
  /// The group's gradients went into a reduction in this backward.
  bool is_reduced = false;

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

/// The reduction of one group's gradients, from packing to the registered parameters' `.grad`.
///
/// Order of calls: pack (constructor), launch, advance, finish. On CUDA nothing blocks the host; the
/// buffers stay referenced here until the current stream has waited for them.
class GradientReduction {
 public:
  /// Takes the unsharded gradients off the handles and packs them.
  explicit GradientReduction(ParamGroup& group);
  /// Starts one reduce-scatter per reduce dtype.
  void launch();

  const ParamGroup& group() const { return *group_; }
  /// Packed gradients are here, or on their way.
  bool holds_inputs() const { return !advanced_ && !parts_.empty(); }

  /// Waits for the reduce-scatter, frees its input; starts the all-reduce where there are replicas.
  void advance();
  /// Waits for all of it and puts or adds the result to the registered parameters' gradients.
  void finish();

 private:
  struct Part {  // one reduce dtype
    at::ScalarType dtype;
    std::vector<size_t> indices;  // of the parameters, by entry
    std::vector<ReduceEntry> entries;
    std::vector<ReduceUnit> units;
    ReduceScatter reduce_scatter;
    std::shared_ptr<Work> all_reduce;
    at::Tensor hook_input;    // what an all-reduce hook was given: its collective may read it yet
    bool is_divided = false;  // by a collective, or by the hook
  };

  void collect();
  void add(size_t index, at::Tensor gradient);
  CollectiveCall call_of(const Part& part, Operation operation, Communicator& comm) const;
  void add_partial_sums(Part& part);
  void store_partial_sums(Part& part);
  at::Tensor local_piece(const Part& part, size_t i) const;
  void assign(size_t index, at::Tensor gradient);
  void start_all_reduce(Part& part);
  void run_hook(Part& part, Communicator& comm);
  bool is_alone() const;
  ReduceScatterOptions options_of(const Part& part) const;
  std::optional<double> scale_in_collective(const Part& part) const;
  Communicator& shard_comm() const;
  void divide_before(Part& part) const;
  GradientDivision division(at::ScalarType dtype) const;

  ParamGroup* group_;  // whose root keeps this, until the group goes
  std::vector<Part> parts_;
  std::vector<std::pair<size_t, at::Tensor>> alone_;  // one rank: the gradients themselves
  bool advanced_ = false, is_partial_ = false;
};

/// True if an all-reduce, or a hook in its place, follows the group's reduce-scatters.
bool has_all_reduce(const ParamGroup& group);

/// True if a handle of the group holds a gradient that no reduction has taken, or a partial sum waits.
bool has_unreduced_gradients(ParamGroup& group);

/// After a backward without reduction: adds the handles' gradients up in the reduce dtype, if that is
/// another one than theirs. Else they stay where autograd adds to them.
void accumulate_in_reduce_dtype(ParamGroup& group);

/// Drops unsharded gradients and partial sums.
void drop_unreduced_gradients(ParamGroup& group);

}  // namespace fsdp
