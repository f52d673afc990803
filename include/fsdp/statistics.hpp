#pragma once

#include <cstdint>

#include "fsdp/api.hpp"

namespace fsdp {

class FSDPModule;

/// Counts of a root's collectives on this rank since `fully_shard`. They are computed from sizes, so they are the same in
/// every run.
struct FSDP_API StepStatistics {
  int64_t all_gathers = 0;
  int64_t gathered_bytes = 0;  ///< of the outputs of all-gathers, with padding
  int64_t reductions = 0;      ///< one for each group and reduce dtype
  int64_t reduced_bytes = 0;   ///< of the inputs of reduce-scatters, with padding
  /// Bytes that this rank sends for these collectives; it receives as many. Over W ranks, (W-1)/W of what is gathered or
  /// reduced; for the all-reduce over R replicas, 2 (R-1)/R of this rank's sums.
  int64_t communicated_bytes = 0;
  /// Bytes of all buffers that were allocated for them: unsharded parameters, packed pieces, reduced gradients. Buffers of
  /// communicators, extensions and hooks do not count.
  int64_t buffer_bytes = 0;
  /// Bytes that were copied between device and host for CPUOffloadPolicy: shards, with padding, and reduced gradients. 0 on a
  /// mesh of CPUs.
  int64_t offloaded_bytes = 0;
};

/// The statistics of the root of `module`. No communication.
FSDP_API StepStatistics statistics(const FSDPModule& module);

/// Milliseconds that the host has waited for collectives of `module`'s root in the latest step. With NCCL the device waits and
/// not the host; that is not counted. Differs between runs. No communication.
FSDP_API double exposed_wait_ms(const FSDPModule& module);

}  // namespace fsdp
