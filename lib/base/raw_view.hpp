#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp {

/// `base`'s memory under other sizes: what as_strided gives, made without the dispatcher, which
/// costs ten times as much as the tensor itself (1,500 instructions a view, and a group's pieces are viewed
/// four times a step). For the runtime's own buffers: no autograd, own version counter.
/// offset: in elements from the start of the storage.
at::Tensor raw_view(const at::Tensor& base, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                    int64_t offset);

/// 1-D: `numel` elements from `offset` on.
at::Tensor raw_view(const at::Tensor& base, int64_t numel, int64_t offset);

/// Makes a storage without memory, which a raw view is given while it waits to be used again.
c10::Storage empty_storage(c10::Device device);

}  // namespace fsdp
