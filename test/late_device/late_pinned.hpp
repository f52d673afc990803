#pragma once

#include <c10/core/Allocator.h>

#include <memory>

namespace fsdp::test {

/// Host memory that copies of late devices may use while the host goes on. Freed, it is poisoned as soon as no copy
/// that was queued before uses it.
c10::Allocator& late_pinned_allocator();

bool is_pinned_for_late(const void* memory);
/// How often anybody has asked that, which a driver takes its time to answer.
int64_t questions_whether_pinned();

/// What a queued copy holds: the memory's block. Null where it is not pinned.
std::shared_ptr<void> pinned_block_of(const void* memory);

}  // namespace fsdp::test
