#pragma once

#include <ATen/core/Tensor.h>

#include "fsdp/dtensor.hpp"
#include "root/find_param.hpp"

namespace fsdp {

/// One of the parameters whose local shard `tensor` is; nullopt for any other tensor.
std::optional<FoundParam> find_local_shard(const at::Tensor& tensor);

/// The mesh of all that is known of a parameter: the data-parallel dimensions, then the tensor-parallel ones.
const DeviceMesh& mesh_of(const FoundParam& found);
/// The placements on it of a parameter that is not in a flat layout.
std::vector<Placement> placements_of(const FoundParam& found);

/// Sizes and strides of the whole tensor; the unsharded parameter's but for a tensor-parallel parameter.
c10::IntArrayRef whole_sizes(const FoundParam& found);
c10::IntArrayRef whole_strides(const FoundParam& found);
/// The elements of the whole tensor that the sharded parameter holds; see fsdp::local_ranges.
std::vector<ElementRange> ranges_of(const FoundParam& found);

/// Which rank holds which elements, as a number that all ranks of `mesh_of` share: the ranges of one rank may be
/// the same in two layouts, those of all are not. Never 0.
uint64_t cut_of(const FoundParam& found);

/// `local`, spread over the ranks as the sharded parameter is, joined with its mesh.
DTensor as_dtensor(const FoundParam& found, const at::Tensor& local);

/// The memory of a sharded parameter, in either form, as an ordinary tensor, which operators treat as such.
at::Tensor plain_view(const at::Tensor& parameter);

/// This rank's part of a tensor that an optimizer keeps for the parameter: it may be a DTensor, whole, or the part itself.
at::Tensor own_state(const FoundParam& found, const at::Tensor& state);
/// An optimizer's tensor for the parameter with this part: in the form of the parameter.
at::Tensor state_of(const FoundParam& found, at::Tensor local);

}  // namespace fsdp
