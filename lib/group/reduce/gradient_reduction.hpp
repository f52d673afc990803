#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <memory>
#include <optional>
#include <vector>

#include "collectives/reduce_scatter.hpp"
#include "group/reduce/gradient_division.hpp"
#include "group/reduce/reduction_slots.hpp"
#include "trace/collective_trace.hpp"

namespace fsdp {

class ParamGroup;

/// The reduction of one group's gradients, from packing to the registered parameters' `.grad`.
///
/// Order of calls: pack (constructor), launch, advance, finish; the root's streams are joined behind the last one
/// (Note [Streams of a root]). Where everything waits in streams, and nothing of it is the user's code, `launch` queues
/// all that is to be done beside the stream that computes, and the others only take memory back. Else, and on the CPU,
/// each does its part on the current stream, and may block the host.
class GradientReduction {
 public:
  /// Takes the unsharded gradients off the handles and packs them. is_behind_one: another of the group's is under way that
  /// does its part in turn, so this one does, too.
  GradientReduction(ParamGroup& group, bool is_behind_one);
  /// Of the slot that the group's reductions want when all trainable parameters have gradients.
  static int64_t planned_slot_bytes(ParamGroup& group);
  /// Its reduce-scatters begin when the gather of `gathered` has arrived, and neither the host nor the stream that computes
  /// waits for that. False: something would have to.
  bool hold_back_by(const ParamGroup& gathered);
  /// Starts one reduce-scatter per reduce dtype.
  void launch();
  /// What follows is queued on streams beside the current one.
  bool is_beside() const { return is_beside_; }

  const ParamGroup& group() const { return *group_; }
  /// Packed gradients are here, or on their way.
  bool holds_inputs() const { return !advanced_ && !parts_.empty(); }

  /// Waits for the reduce-scatter and frees its input; starts the all-reduce where there are replicas.
  void advance();
  /// Waits for all of it and puts or adds the result to the registered parameters' gradients. What it holds may go
  /// then.
  void finish();

 private:
  struct Part {  // one reduce dtype
    at::ScalarType dtype;
    std::vector<size_t> indices;  // of the parameters, by entry
    std::vector<ReduceEntry> entries;
    std::vector<ReduceUnit> units;
    int64_t slot_bytes = 0;
    ReduceScatter reduce_scatter;
    std::shared_ptr<Work> all_reduce;
    at::Tensor hook_input;    // what an all-reduce hook was given: its collective may read it yet
    bool is_divided = false;  // by a collective, or by the hook
  };

  explicit GradientReduction(ParamGroup* group) : group_(group) {}
  void collect();
  void plan_joint_dtype();
  at::ScalarType dtype_of(size_t index, const at::Tensor& gradient) const;
  int64_t measure();
  at::Tensor take_slot();
  void add(size_t index, at::Tensor gradient);
  CollectiveCall call_of(const Part& part, Operation operation, Communicator& comm) const;
  bool can_be_beside() const;
  bool can_settle_beside() const;
  bool waits_in_streams() const;
  void run_beside();
  bool queues_more() const;
  void continue_behind_reduce_scatters();
  void free_inputs();
  // what becomes of the sums (reduced_gradients.cpp)
  void settle();
  void add_partial_sums(Part& part);
  void store_partial_sums(Part& part);
  at::Tensor local_piece(const Part& part, size_t i) const;
  struct Settling;
  void assign(size_t index, at::Tensor gradient, Settling& settling);
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
  std::unique_ptr<ReductionSlots::Hold> slot_;  // of the parts' inputs; null: they are in LibTorch's memory
  std::vector<std::pair<size_t, at::Tensor>> alone_;  // one rank: the gradients themselves
  std::optional<at::ScalarType> joint_dtype_;         // that the gradients at hand promote to, where that counts
  bool advanced_ = false, is_partial_ = false, is_beside_ = false;
  bool is_settled_ = false;
  std::optional<c10::Stream> packed_on_;         // where there are streams: the inputs' memory is its
  std::optional<c10::Event> reduced_, settled_;  // beside: behind the reduce-scatters, behind what follows them
};

/// Over which the group's gradients are reduce-scattered.
const std::shared_ptr<Communicator>& reduction_comm(const ParamGroup& group);

/// True if an all-reduce, or a hook in its place, follows the group's reduce-scatters.
bool has_all_reduce(const ParamGroup& group);

}  // namespace fsdp
