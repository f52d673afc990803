#pragma once

#include <ATen/core/Tensor.h>


namespace fsdp {

class ParamGroup;

/// The whole of what is spread over the ranks as parameter `index` is (its values, its gradient, its optimizer
/// state), in memory of its own on the mesh's device, with the parameter's sizes and strides and local's
/// dtype. local: shaped like the sharded parameter. Knows a layout by `element_ranges` alone.
/// A collective call over the shard group: one all-gather of the largest part's size.
at::Tensor gather_values(const ParamGroup& group, size_t index, const at::Tensor& local);

}  // namespace fsdp
