#pragma once

#include <c10/core/Allocator.h>

namespace fsdp::test {

/// Memory of the current late device, owned by its current stream. Given back, it is the next allocation's of that size on
/// the same stream, and whatever that stream allocates next may lie in it: it is poisoned there, behind all that the
/// stream has queued until then. No other stream ever gets it. Like CUDA's caching allocator it knows nothing of other
/// streams' uses; unlike it, nobody can tell it of them.
c10::Allocator& late_allocator();

/// Bytes that are NaN in every floating-point dtype.
inline constexpr int kPoison = 0xff;

/// When no stream has anything left to do: what is free goes back to the host, what is not goes there when it is freed.
void forget_late_memory();

}  // namespace fsdp::test
