#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace fsdp::bench {

/// The host's memory, which counts.
c10::Allocator& simulated_allocator();

/// In memory of its own: as many of its bytes as fit are kept.
void resize_simulated(c10::StorageImpl& storage, size_t bytes);

}  // namespace fsdp::bench
