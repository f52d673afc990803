#pragma once

#include <chrono>
#include <cstdint>

#include "fsdp/api.hpp"

namespace fsdp {

/// A mode that finds memory and ordering faults. It costs memory and time.
///
/// - Buffers are filled with 0xFF, a NaN in each floating-point dtype, when they are allocated and when they are released.
///   Released buffers stay in quarantine. A pointer that is used after a reshard reads NaN, and a write to it is found.
/// - Collectives are delayed at random, and their output is NaN until the wait. A write to the input or output of a collective
///   before its wait is found. With backend nccl, streams are delayed before collectives: work that does not wait for them
///   gets NaN.
/// - Writes that no operator makes (through a raw pointer, or by a kernel whose schema does not declare the write) are found:
///   to an unsharded parameter when it is resharded, to a sharded one when the next step begins. Such a write to an unsharded
///   parameter is lost. One to a sharded parameter is kept, unknown to autograd and the other ranks.
///
/// Each fault is logged with the parameter's or the buffer's name when it is found. The end of backward, the next step or
/// `FSDPModule::reshard` then throws StateError with all faults of this rank; that step is complete by then. Results and
/// collectives are those of a run without the mode, so it may be enabled on some ranks only.
struct FSDP_API SanitizerOptions {
  bool is_enabled = true;
  uint64_t seed = 1;  ///< of the random delays, which differ between ranks and groups
  /// The bytes of released memory in quarantine, for the whole process; at least the last buffer stays. If sharded modules ask
  /// for different numbers, the largest counts.
  int64_t quarantine_bytes = int64_t{64} << 20;
  /// The longest delay.
  std::chrono::microseconds max_delay{500};
};

}  // namespace fsdp
