#include "group/reduce/reduce_call.hpp"

#include <algorithm>

#include "group/param_group.hpp"
#include "group/reduce/mean_over_ranks.hpp"

namespace fsdp {

const std::shared_ptr<Communicator>& reduction_comm(const ParamGroup& group) {
  const auto& config = group.options().reduce;
  return config.uses_separate_group ? config.separate_group : group.identity().mesh_info.shard_group;
}

bool has_all_reduce(const ParamGroup& group) {
  return group.identity().mesh_info.replicate_size() > 1 || group.options().reduce.all_reduce_hook;
}

bool reduces_alone(const ParamGroup& group) {
  return group.identity().mesh_info.data_parallel_size() == 1 && !group.options().reduce.all_reduce_hook;
}

bool has_gradients_to_reduce(const ParamGroup& group) {
  const auto& config = group.options().reduce;
  return config.requires_gradient_sync && group.gradients().store.has_unreduced(config.requires_all_reduce);
}

bool has_all_gradients(const ParamGroup& group) {
  // Ranks may use different parameters then: no rank may start a reduction because its own are
  // complete, or the order of collectives would depend on the data.
  const auto& gradients = group.gradients();
  return !gradients.options.reduces_unused_params && gradients.store.is_complete(gradients.trainable_count);
}

bool owes_zeros(const ParamGroup& group) {
  const auto& gradients = group.gradients();
  return gradients.options.requires_gradient_sync && gradients.options.reduces_unused_params && gradients.trainable_count > 0;
}

bool reduces_in_streams(const ParamGroup& group) {
  const auto& info = group.identity().mesh_info;
  return (info.shard_size() == 1 || reduction_comm(group)->waits_in_streams()) &&
         (info.replicate_size() == 1 || info.replicate_group->waits_in_streams());
}

ReduceScatterOptions options_of(const ParamGroup& group, const ReduceBucket& bucket) {
  return {.sum = at::TensorOptions().dtype(bucket.dtype).device(group.parts().config.device),
          .custom = group.options().reduce.custom_reduce_scatter.get(),
          .scale = has_all_reduce(group) ? std::nullopt : scale_in_collective(group, bucket.dtype)};
}

CollectiveCall call_of(const ParamGroup& group, const ReduceBucket& bucket, Operation operation, Communicator& comm) {
  CollectiveCall call{operation, group.identity(), comm, /*bytes=*/0, bucket.dtype, /*params=*/0};
  for (const size_t i : bucket.indices) {
    call.bytes += c10::multiply_integers(group.params()[i].spec.sizes());
    call.params |= uint64_t{1} << std::min<size_t>(i, 63);
  }
  call.bytes *= static_cast<int64_t>(c10::elementSize(bucket.dtype));
  return call;
}

int64_t measure_slot(const ParamGroup& group, std::span<ReduceBucket> buckets) {
  const auto& comm = group.parts().launched_on(*reduction_comm(group));
  int64_t bytes = 0;
  for (auto& bucket : buckets)
    bytes += bucket.slot_bytes = packed_bytes(bucket.segments, bucket.entries, options_of(group, bucket), comm);
  return bytes;
}

}  // namespace fsdp
