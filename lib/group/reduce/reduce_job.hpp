#pragma once

#include <memory>

#include "collectives/stream_buffer.hpp"
#include "group/reduce/reduce_bucket.hpp"
#include "group/reduce/reduce_stage.hpp"
#include "group/reduce/reduction_slots.hpp"
#include "trace/step_meter.hpp"

namespace fsdp {

class ParamGroup;
class UserHooks;

/// Who takes a reduction from stage to stage.
enum class ReduceDriver : uint8_t {
  kHost,     ///< in its turn, on the current stream, which may block it
  kStreams,  ///< those beside the one that computes: `start` queues all that is to be done
};

/// The reduction of one group's gradients, from packing to the sharded parameters' `.grad` (see ReduceStage).
///
/// Order of calls: the constructor packs; start, free_inputs, finish. The root's streams are joined behind the last one
/// (Note [Streams of a root]). The driver is kStreams where everything waits in streams and nothing of it is the user's code;
/// then free_inputs and finish only take memory back.
class ReduceJob {
 public:
  /// Takes the unsharded gradients off the unsharded parameters and packs them. is_behind_one: another of the group's is under
  /// way that the host drives, so it drives this one, too. The group outlives this.
  ReduceJob(ParamGroup& group, bool is_behind_one);
  ReduceJob(ReduceJob&&) = default;
  /// What this one holds goes as if it were destroyed: in a vector, another is moved over one that is erased.
  ReduceJob& operator=(ReduceJob&& other) noexcept;
  /// What it holds goes, and the group keeps the rest of its buckets.
  ~ReduceJob();

  const ParamGroup& group() const { return *group_; }
  ReduceStage stage() const { return stage_; }
  ReduceDriver driver() const { return driver_; }
  /// Packed gradients are here, or on their way.
  bool holds_inputs() const { return !has_freed_inputs_ && !inputs_.buckets.empty(); }

  /// Its reduce-scatters begin when the gather of `gathered` has arrived, and neither the host nor the stream that computes
  /// waits for that. False: something would have to.
  bool hold_back_by(const ParamGroup& gathered);
  /// Starts one reduce-scatter per reduce dtype, as on the stream that packed.
  void start();
  /// Waits for the reduce-scatters and frees their inputs; starts the all-reduces where there are replicas.
  void free_inputs();
  /// Waits for all of it and puts or adds the result to the sharded parameters' gradients. What it holds may go then.
  /// hooks: who is told of users' hooks on gradients; `start` runs none.
  void finish(UserHooks& hooks);

 private:
  void give_up() noexcept;
  void enter(ReduceEvent event);
  at::Tensor take_slot();
  void pack();
  bool can_be_on_streams() const;
  bool can_assign_on_streams() const;
  bool queues_more() const;
  void hold_inputs();
  void hold_sums();
  void continue_on_streams();
  void continue_behind_reduce_scatters();

  ParamGroup* group_;
  ReduceStage stage_ = ReduceStage::kPacked;  // on streams: of what has been queued
  ReduceDriver driver_ = ReduceDriver::kHost;
  ReduceInputs inputs_;
  std::shared_ptr<ReductionSlots::Hold> slot_;  // of the buckets' inputs; null: they are in LibTorch's memory
  PackedBytes packed_;  // of the buckets' inputs
  bool has_freed_inputs_ = false;
  StreamBuffer sent_;  // holds the buckets' inputs, of the stream that packed them
  StreamBuffer sums_;  // on streams: holds what the reduce-scatters gave, while more is done with it
};

}  // namespace fsdp
