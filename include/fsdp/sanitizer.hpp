#pragma once

#include <chrono>
#include <cstdint>

namespace fsdp {

/// A mode that finds what is wrong with memory and order, at the price of memory and time:
///
/// - Buffers are poisoned when they are made and before they are given back: every byte is 0xFF, a NaN
///   in each floating-point dtype. Released ones stay in quarantine, so that a pointer kept beyond a
///   reshard reads NaN and not somebody else's values; a write to one is found.
/// - Collectives deliver late, after a random delay; until the wait for one its output is poison. A
///   write to the input, or to the output, of one under way is found. Where waits are streams' (backend nccl), streams
///   stall in front of collectives instead: what comes too early, or waits for nothing, has NaN as its result.
/// - A write that passed no operator (through a raw pointer, by a kernel whose schema does not say that it
///   writes) is found, to an unsharded parameter when it is resharded, to a sharded parameter when the
///   next step begins. Such a write to an unsharded parameter is lost; to a sharded parameter it is kept, but other
///   ranks and autograd do not know of it.
///
/// Each fault is logged when it is found, by the name of the parameter or of the buffer. The end of the
/// backward, the next step or `FSDPModule::reshard` throws StateError with all that was found on this
/// rank; the step itself is complete by then. Results are those of a run without the mode, and so are
/// the collectives: it may be on for some ranks only.
struct SanitizerOptions {
  bool is_enabled = true;
  uint64_t seed = 1;  ///< of the delays; each rank and group draws its own
  /// Of released memory that is kept, in the whole process; at least the last buffer is. The largest that
  /// a sharded module of the process asks for counts.
  int64_t quarantine_bytes = int64_t{64} << 20;
  /// A wait takes up to this much longer.
  std::chrono::microseconds max_delay{500};
};

}  // namespace fsdp
