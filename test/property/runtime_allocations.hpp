#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

namespace fsdp::test {

/// From now on, counts the tensor memory that is allocated inside the library's own ranges
/// ("FSDP::all_gather (blocks.3)", ...), which it shows to profilers. Once per process.
void watch_runtime_allocations();

/// Called at the start of each such range on this thread; none: nothing is called.
void listen_to_ranges(std::function<void(std::string_view name)> on_start);

/// Bytes so far, on this thread. A rank that is a thread runs its steps on that thread alone.
int64_t runtime_allocated_bytes();

}  // namespace fsdp::test
