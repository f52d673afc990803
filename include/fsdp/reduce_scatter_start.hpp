#pragma once

#include <array>

namespace fsdp {

/// When reduce-scatters begin that have a communicator of their own, beside the all-gather that goes into the room of the
/// group they are for (FSDPModule::set_reduce_scatter_start).
///
/// Equal collectives of two communicators that begin together keep in step: neither sends while the other's latency
/// passes. Holding back the first reduce-scatter of a backward shifts all that follow it, once. Which choice is best
/// depends on how long computing and communicating take, which only a measurement tells; gradients are the same with all.
///
/// What is held back keeps its packed gradients, and those of the next groups come beside them: set one buffer more than groups
/// are gathered ahead (set_reduce_scatter_max_input_buffers). With one the first goes before the second are packed.
enum class ReduceScatterStart {
  /// At once; or, where the all-gather is larger than all that is computed before its parameters are used, with that use.
  kBySize,
  /// The first of a backward when that all-gather has arrived, and neither the host nor computing waits for that; the others at
  /// once. So it is with NCCL's communicators of the library's own. Over c10d's process groups, and where the group's
  /// collectives or all-reduce hook are the user's, the first begins when the gathered parameters are used.
  kFirstAfterAllGather,
  /// The first of a backward when the backward of the next group is over, the others at once.
  kFirstAfterNextBackward,
};

inline constexpr std::array kReduceScatterStarts = {ReduceScatterStart::kBySize, ReduceScatterStart::kFirstAfterAllGather,
                                                    ReduceScatterStart::kFirstAfterNextBackward};

/// "by_size", "first_after_all_gather" or "first_after_next_backward".
const char* name_of(ReduceScatterStart start);

}  // namespace fsdp
