#pragma once

#include <ATen/core/Tensor.h>

#include "fsdp/dtensor.hpp"
#include "group/find_param.hpp"

namespace fsdp {

/// The placements of a parameter that is not in a flat layout.
std::vector<Placement> placements_of(const FoundParam& found);

/// `local`, spread over the ranks as the registered parameter is, joined with its mesh.
DTensor as_dtensor(const FoundParam& found, const at::Tensor& local);

/// The same memory as an ordinary tensor, which operators treat as such.
at::Tensor plain_view(const at::Tensor& registered);

}  // namespace fsdp
