#pragma once

#include <c10/core/Allocator.h>

namespace fsdp::test {

/// Memory of the current late device, owned by its current stream. Given back, it is poisoned behind all that this
/// stream has queued, and is at once the next allocation's of that size on the same stream; no other stream ever gets
/// it. Like CUDA's caching allocator it knows nothing of other streams' uses; unlike it, nobody can tell it of them.
c10::Allocator& late_allocator();

/// Bytes that are NaN in every floating-point dtype.
inline constexpr int kPoison = 0xff;

/// When no stream has anything left to do: what is free goes back to the host, what is not goes there when it is freed.
void forget_late_memory();

}  // namespace fsdp::test
