#pragma once

#include <memory>
#include <span>

#include "group/reduce/reduce_bucket.hpp"
#include "trace/collective_trace.hpp"

// What a group's collectives over gradients are called with.
namespace fsdp {

class ParamGroup;

/// Over which the group's gradients are reduce-scattered.
const std::shared_ptr<Communicator>& reduction_comm(const ParamGroup& group);
/// True if an all-reduce, or a hook in its place, follows the group's reduce-scatters.
bool has_all_reduce(const ParamGroup& group);
/// One rank and nobody else to ask: gradients stay where they are.
bool reduces_alone(const ParamGroup& group);
/// Gradients wait for a reduction that the group may start: on its unsharded parameters, or in sums of backwards without one.
bool has_gradients_to_reduce(const ParamGroup& group);
/// All gradients that a reduction in this backward takes have arrived.
bool has_all_gradients(const ParamGroup& group);
/// A backward reduces the group whatever gradients this rank has, as others may have some (set_reduce_scatter_unused_params).
bool owes_zeros(const ParamGroup& group);
/// None of its collectives blocks the host.
bool reduces_in_streams(const ParamGroup& group);

ReduceScatterOptions options_of(const ParamGroup& group, const ReduceBucket& bucket);
/// Describes a collective of the bucket for the trace.
CollectiveCall call_of(const ParamGroup& group, const ReduceBucket& bucket, Operation operation, Communicator& comm);
/// Returns the bytes that all buckets' inputs take in registered memory, and notes each bucket's own (`slot_bytes`).
int64_t measure_slot(const ParamGroup& group, std::span<ReduceBucket> buckets);

}  // namespace fsdp
