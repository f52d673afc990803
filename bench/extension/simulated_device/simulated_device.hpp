#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>

#include "extension/simulated_device/simulated_streams.hpp"

namespace fsdp::bench {

// Note [Simulated device]
// A device of LibTorch's (PrivateUse1, "simulated") for programs whose schedule is to be seen: its streams and events are
// those of SimulatedStreams, its memory is the host's. Operators give their results at once and take no time; what takes
// time says so itself (SimulatedStreams::compute, and the collectives of SimulatedBackend). The host takes none either:
// it is as far ahead as streams let it be, and time passes when it synchronizes.

inline constexpr auto kSimulated = c10::DeviceType::PrivateUse1;

/// Makes it known to LibTorch, once.
void register_simulated_device();

SimulatedStreams& simulated_streams();

/// Of the calling thread.
c10::Stream current_simulated_stream();
size_t number_of(const c10::Stream& stream);

/// Of tensors there. Bytes come and go when the host says so, as those of CUDA's caching allocator do.
struct SimulatedMemory {
  int64_t live_bytes = 0, peak_bytes = 0;
};
SimulatedMemory simulated_memory();
void reset_simulated_peak();

}  // namespace fsdp::bench
