#pragma once

#include <array>

#include "fsdp/api.hpp"

namespace fsdp {

/// When reduce-scatters over a communicator of their own start, relative to the all-gather that follows the release of their
/// group (FSDPModule::set_reduce_scatter_start). Gradients do not depend on it.
///
/// If two communicators start collectives of equal size at the same time, they stay in step: both wait out their latency at
/// once, and the network idles. Delaying the first reduce-scatter of a backward shifts all later ones. Which start is fastest
/// depends on the times of compute and communication: measure it (FSDPModule::choose_reduce_scatter_start).
///
/// A delayed reduce-scatter keeps its packed gradients while the next groups pack theirs. Set one buffer more than the
/// prefetch distance (set_reduce_scatter_max_input_buffers). With a single buffer, the first starts before the second is
/// packed.
enum class ReduceScatterStart {
  /// At once. If the group being gathered is larger than all groups that are used before it: when it is used.
  kBySize,
  /// The first of a backward when that all-gather is done, without a wait of the host or of compute; the others at once. This
  /// needs the library's own NCCL communicators. Over c10d's process groups, and with custom collectives or an all-reduce
  /// hook, the first starts when the gathered parameters are used.
  kFirstAfterAllGather,
  /// The first of a backward when the backward of the next group is done; the others at once.
  kFirstAfterNextBackward,
};

inline constexpr std::array kReduceScatterStarts = {ReduceScatterStart::kBySize, ReduceScatterStart::kFirstAfterAllGather,
                                                    ReduceScatterStart::kFirstAfterNextBackward};

/// "by_size", "first_after_all_gather" or "first_after_next_backward".
FSDP_API const char* name_of(ReduceScatterStart start);

}  // namespace fsdp
