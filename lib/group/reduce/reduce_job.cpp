#include "group/reduce/reduce_job.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "base/log.hpp"
#include "base/require.hpp"
#include "comm/debug/poison.hpp"
#include "dispatch/residency.hpp"
#include "group/comm_context.hpp"
#include "group/group_sanitizer.hpp"
#include "group/param_group.hpp"
#include "group/reduce/all_reduce.hpp"
#include "group/reduce/collect_gradients.hpp"
#include "group/reduce/mean_over_ranks.hpp"
#include "group/reduce/partial_sums.hpp"
#include "group/reduce/reduce_call.hpp"
#include "group/reduce/sharded_grads.hpp"
#include "group/symmetric_memory.hpp"

namespace fsdp {

ReduceJob::ReduceJob(ParamGroup& group, bool is_behind_one) : group_(&group) {
  auto& parts = group.parts();
  const Range range(parts.comm_ctx->trace, "FSDP::post_backward_reduce", parts.identity);
  const GroupBuffers buffers(parts, "reduced gradients");
  BelowResidency below;
  group.gradients().streams.take(group.gradients().store);
  inputs_ = collect_gradients(group);
  pack();
  if (!is_behind_one && can_be_on_streams()) driver_ = ReduceDriver::kStreams;
  sent_.begin(parts.config.device);
  if (sent_.owner()) hold_inputs();
}

ReduceJob::~ReduceJob() {
  if (holds_inputs()) give_up();
  slot_.reset();  // waits for what is under way, before the memory goes
  if (!inputs_.buckets.empty()) keep_buckets(*group_, std::move(inputs_.buckets));
}

ReduceJob& ReduceJob::operator=(ReduceJob&& other) noexcept {
  if (this == &other) return *this;
  std::destroy_at(this);
  return *std::construct_at(this, std::move(other));
}

/// Behind an exception or a reset. What is under way still keeps its memory; but what has been waited for goes back to the
/// stream that packed it, and a graph must not end with a stream for which nobody waits.
void ReduceJob::give_up() noexcept {
  const auto packed_on = sent_.owner();
  if (!packed_on) return;
  try {
    if (is_capturing(current_stream(packed_on->device())).value_or(false))
      for (auto& bucket : inputs_.buckets)
        for (const auto& work : {bucket.reduce_scatter.work, bucket.all_reduce})
          if (work) work->wait();
    sent_.note_use();
    sent_.reset();
  } catch (const std::exception& error) {
    log().info("{}: a reduction that is no longer needed failed: {}", group_->name(), error.what());
  }
}

void ReduceJob::enter(ReduceEvent event) {
  const auto [next, error] = transition(stage_, event);
  require_state(error == nullptr, "{}: {}", group_->name(), error);
  stage_ = next;
}

/// 1-D bytes for the buckets one after another; undefined: there is no slot.
at::Tensor ReduceJob::take_slot() {
  if (!reduces_in_slots(*group_)) return {};
  const int64_t bytes = measure_slot(*group_, inputs_.buckets);
  slot_ = group_->parts().comm_ctx->reduction_slots.hold(*group_, bytes);
  return slot_ ? slot_->take(bytes) : at::Tensor();
}

void ReduceJob::pack() {
  auto& comm = group_->parts().launched_on(*reduction_comm(*group_));
  const auto slot = take_slot();
  int64_t begin = 0;
  for (auto& bucket : inputs_.buckets) {
    // Before it is cast too: what float32 holds need not fit into float16 whole.
    const double factor = division_of(*group_, bucket.dtype).before;
    for (auto& entry : bucket.entries)
      if (entry.gradient.defined() && factor != 1) entry.gradient.div_(factor);
    auto options = options_of(*group_, bucket);
    if (slot.defined()) options.memory = slot.narrow(0, std::exchange(begin, begin + bucket.slot_bytes), bucket.slot_bytes);
    pack_reduce_scatter(bucket.reduce_scatter, bucket.segments, bucket.entries, options, comm, group_->name());
    // Free the gradients now, not when the collective is done: where they were packed nothing refers to them any more,
    // and waiting would keep two groups' gradients alive at once.
    for (auto& entry : bucket.entries) {
      if (group_->parts().sanitizer != nullptr) poison_if_last(entry.gradient);
      entry.gradient.reset();
    }
  }
  int64_t bytes = 0;
  for (const auto& bucket : inputs_.buckets) bytes += bucket.reduce_scatter.layout->total_bytes();
  packed_ = PackedBytes(group_->parts().comm_ctx->meter, bytes);
}

void ReduceJob::hold_inputs() {
  for (const auto& bucket : inputs_.buckets)
    for (const auto& input : bucket.reduce_scatter.inputs.tensors()) sent_.hold(input);
}

/// By options alone: with all-reduces it decides the order of launches.
bool ReduceJob::can_be_on_streams() const {
  const auto& config = group_->parts().config;
  const auto& reduction = group_->options().reduce;
  if (!SideStream::exists_on(config.device)) return false;
  if (reduction.all_reduce_hook || reduction.custom_reduce_scatter || !reduces_in_streams(*group_)) return false;
  // Alone there is nothing to wait for but copies to the host.
  if (reduces_alone(*group_) && !config.host_memory) return false;
  // Partial sums go from backward to backward, and with them the stream that they were allocated on.
  return (!has_all_reduce(*group_) || reduction.requires_all_reduce) && !group_->gradients().store.has_partial_sums();
}

/// What would block the host or run a user's code waits for its turn instead, on the stream that computes.
bool ReduceJob::can_assign_on_streams() const {
  if (group_->parts().local_shards != nullptr) return false;  // they may let go of gradients that are a user's
  const auto& host_memory = group_->parts().config.host_memory;
  if (host_memory && !host_memory->is_pinned) return false;
  return std::ranges::none_of(group_->params(), [&](const FSDPParam& param) {
    const auto local_tensor = param.local_tensor();
    return local_tensor.defined() && (has_user_hooks(param) || (host_memory && local_tensor.grad().defined()));
  });
}

bool ReduceJob::hold_back_by(const ParamGroup& gathered) {
  const auto& parts = group_->parts();
  auto& comm = *reduction_comm(*group_);
  auto* gather = gathered.unsharder().gather_under_way();
  // What a user's collective gives may depend on whether it is done, which differs by rank.
  const bool is_custom = group_->options().reduce.custom_reduce_scatter || gathered.unsharder().inputs().custom();
  const bool is_on_streams = driver_ == ReduceDriver::kStreams;
  if (gather == nullptr || inputs_.buckets.empty() || is_custom || (comm.waits_in_streams() && !is_on_streams)) return false;
  const auto beside =
      is_on_streams ? parts.comm_ctx->reduce_scatter_stream.enter(parts.config.device) : SideStream::Entered();
  return gather->hold_back(comm);
}

void ReduceJob::start() {
  enter(ReduceEvent::kStart);
  const c10::OptionalStreamGuard on_theirs(sent_.owner());
  auto& parts = group_->parts();
  auto& comm_ctx = *parts.comm_ctx;
  const GroupBuffers buffers(parts, "reduced gradients");
  BelowResidency below;
  const bool is_on_streams = driver_ == ReduceDriver::kStreams;
  const auto beside =
      is_on_streams ? comm_ctx.reduce_scatter_stream.enter(parts.config.device) : SideStream::Entered();
  auto& comm = *reduction_comm(*group_);
  for (auto& bucket : inputs_.buckets) {
    auto& reduce_scatter = bucket.reduce_scatter;
    auto options = options_of(*group_, bucket);
    options.reads_slot = slot_ != nullptr && bucket.slot_bytes > 0;
    comm_ctx.trace.launch(call_of(*group_, bucket, Operation::kReduceScatter, comm), [&] {
      launch_reduce_scatter(reduce_scatter, options, parts.launched_on(comm), parts.name());
    });
    if (slot_ && reduce_scatter.work) slot_->note_reader(reduce_scatter.work);
    bucket.is_divided = reduce_scatter.is_scaled;
    comm_ctx.trace.note_bytes(reduce_scatter.layout->total_bytes());
    auto& statistics = comm_ctx.meter.total();
    ++statistics.reductions;
    statistics.reduced_bytes += reduce_scatter.layout->total_bytes();
    statistics.communicated_bytes += (comm.size() - 1) * reduce_scatter.layout->rank_bytes();
  }
  if (is_on_streams) continue_on_streams();
}

/// On the stream of reduce-scatters, which those that come next wait for anyway; all-reduces, divisions and copies, which
/// they do not, go on another.
void ReduceJob::continue_on_streams() {
  const auto device = group_->parts().config.device;
  continue_behind_reduce_scatters();
  sent_.record_last_use();
  if (!can_assign_on_streams()) return;
  enter(ReduceEvent::kAssign);
  if (!queues_more()) return assign_sharded_grads(*group_, inputs_, KeepsAlone::kYes, nullptr);
  hold_sums();
  const auto behind = group_->parts().comm_ctx->post_reduce_stream.enter(device);
  assign_sharded_grads(*group_, inputs_, KeepsAlone::kYes, nullptr);
  sums_.record_last_use();
}

/// Of the current stream; or where one rank has only packed them, of the one that did.
void ReduceJob::hold_sums() {
  if (group_->identity().mesh_info.shard_size() > 1)
    sums_.begin(group_->parts().config.device);
  else
    sums_.begin(sent_);
  for (const auto& bucket : inputs_.buckets) sums_.hold(bucket.reduce_scatter.output);
  for (const auto& [index, gradient] : inputs_.alone) sums_.hold(gradient);
}

/// False: what the reduce-scatters gave becomes the gradients as it is.
bool ReduceJob::queues_more() const {
  const auto& config = group_->parts().config;
  if (!inputs_.alone.empty() || config.host_memory) return true;
  return std::ranges::any_of(inputs_.buckets, [&](const ReduceBucket& bucket) {
    if (bucket.all_reduce || (!bucket.is_divided && division_of(*group_, bucket.dtype).after != 1)) return true;
    return std::ranges::any_of(bucket.indices, [&](size_t i) {
      const auto local_tensor = group_->params()[i].local_tensor();
      return local_tensor.defined() && (local_tensor.grad().defined() || kept_dtype(*group_, i, bucket.dtype) != bucket.dtype);
    });
  });
}

void ReduceJob::free_inputs() {
  if (std::exchange(has_freed_inputs_, true)) return;
  BelowResidency below;
  const auto packed_on = sent_.owner();
  if (driver_ != ReduceDriver::kStreams) {
    group_->parts().comm_ctx->let_current_wait_for_reductions();  // sums that they have left
    continue_behind_reduce_scatters();
    sent_.note_use();
  }
  sent_.reset();
  // What is packed next on the same stream takes their memory.
  const c10::OptionalStreamGuard on_theirs(packed_on);
  for (auto& bucket : inputs_.buckets) free_reduce_scatter_inputs(bucket.reduce_scatter);
  packed_.release();
  if (slot_) slot_->note_waited();
  slot_.reset();
}

void ReduceJob::continue_behind_reduce_scatters() {
  const auto& identity = group_->identity();
  const bool is_partial = identity.mesh_info.replicate_size() > 1 && !group_->options().reduce.requires_all_reduce;
  enter(is_partial ? ReduceEvent::kStorePartialSums : ReduceEvent::kAllReduce);
  for (auto& bucket : inputs_.buckets) {
    group_->parts().comm_ctx->trace.wait(Operation::kReduceScatter, identity, bucket.reduce_scatter.work);
    bucket.reduce_scatter.work.reset();
    if (is_partial) {
      store_partial_sums(*group_, bucket);
    } else if (has_all_reduce(*group_)) {
      add_partial_sums(*group_, bucket);
      start_all_reduce(*group_, bucket);
    }
  }
}

void ReduceJob::finish(UserHooks& hooks) {
  free_inputs();
  auto& comm_ctx = *group_->parts().comm_ctx;
  if (stage_ == ReduceStage::kReduceScattered) {
    comm_ctx.let_current_wait_for_reductions();
    enter(ReduceEvent::kAssign);
    assign_sharded_grads(*group_, inputs_, driver_ == ReduceDriver::kStreams ? KeepsAlone::kYes : KeepsAlone::kNo, &hooks);
  }
  if (!sums_.owner()) return;
  // The root joins its own stream at the end of the backward.
  if (group_->identity().mesh_info.shard_size() > 1) sums_.let_owner_wait();
  sums_.reset();
}

}  // namespace fsdp
