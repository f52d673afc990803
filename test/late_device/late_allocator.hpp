#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

namespace fsdp::test {

/// Memory of the current late device, owned by its current stream. Given back, it is the next allocation's of that size on
/// the same stream, and whatever that stream allocates next may lie in it: it is poisoned there, behind all that the
/// stream has queued until then. No other stream ever gets it. Like CUDA's caching allocator it knows nothing of other
/// streams' uses but what it is told (record_late_stream): then it is nobody's until these streams are done, which nobody
/// waits for. While a stream is captured, what it allocates is of the graph's pool, and stays there.
c10::Allocator& late_allocator();

/// `stream` uses the memory, too.
void record_late_stream(const c10::DataPtr& data, c10::Stream stream);

/// Of a graph, from its beginning to its end. Its number is its own.
void open_late_pool(int pool);
void close_late_pool(int pool);

/// Bytes that are NaN in every floating-point dtype.
inline constexpr int kPoison = 0xff;

/// When no stream has anything left to do: what is free goes back to the host, what is not goes there when it is freed.
void forget_late_memory();

}  // namespace fsdp::test
