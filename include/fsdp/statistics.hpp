#pragma once

#include <cstdint>

namespace fsdp {

class FSDPModule;

/// What a root's steps have done on this rank since `fully_shard`. Counts launches, from the layouts
/// of what was launched: the same on every run, whatever the timing.
struct StepStatistics {
  int64_t all_gathers = 0;
  int64_t gathered_bytes = 0;  ///< of unsharded parameters as they travel, with padding
  int64_t reductions = 0;      ///< one for each group and reduce dtype
  int64_t reduced_bytes = 0;   ///< of unsharded gradients, with padding
  /// Bytes that this rank has to send, and to receive, for these: of W ranks (W-1)/W of what is gathered
  /// or reduced, and of the all-reduce over R replicas 2 (R-1)/R of this rank's sums.
  int64_t communicated_bytes = 0;
  /// Bytes of all buffers made for these: unsharded parameters, packed pieces, reduced gradients.
  /// Those of the communicator, of extensions and of hooks are not among them.
  int64_t buffer_bytes = 0;
  /// Copied between the device and the host for CPUOffloadPolicy: shards to be gathered, with padding,
  /// and reduced gradients. 0 on a mesh of CPUs.
  int64_t offloaded_bytes = 0;
};

/// `module` or any sharded module below the same root. No communication.
StepStatistics statistics(const FSDPModule& module);

/// Milliseconds that the host has waited for collectives of `module`'s root in the step that began last. With backends that
/// work on a stream of a device (NCCL) the device waits instead, which is not in it. Differs from run to run. No communication.
double exposed_wait_ms(const FSDPModule& module);

}  // namespace fsdp
