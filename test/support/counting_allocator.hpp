#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <vector>

namespace fsdp::test {

/// One allocation (`bytes` > 0) or release (`bytes` < 0) of tensor memory.
struct MemoryEvent {
  uintptr_t address = 0;
  int64_t bytes = 0;
};

/// Counts the bytes of live CPU tensors: everything that this process allocates through LibTorch's
/// CPU allocator after `install_counting_allocator`. Thread-safe.
void install_counting_allocator();

/// Bytes allocated and not yet released.
int64_t live_bytes();

/// Starts a new recording: the peak begins at the bytes that are live now.
void start_recording();
/// The most bytes that were live at one moment since `start_recording`.
int64_t peak_bytes();
/// What happened since `start_recording`, in order.
std::vector<MemoryEvent> recorded_events();

/// All bytes that were allocated since then, whether released or not.
int64_t allocated_bytes();

/// What was live at the moment of that peak: how many allocations of each size in bytes.
std::map<int64_t, int> sizes_at_peak();

/// The most bytes that were live at one moment in allocations of exactly these sizes, of those made in `events`.
int64_t peak_of_sizes(std::span<const MemoryEvent> events, const std::set<int64_t>& sizes);

}  // namespace fsdp::test
