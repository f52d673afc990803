#include "tensor/full_tensor.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "comm/watch/awaited_collectives.hpp"
#include "tensor/redistribute/redistribute.hpp"

namespace fsdp {
namespace {

/// `tensor` with the given strides: itself if it has them, else a copy.
at::Tensor with_strides(at::Tensor tensor, c10::IntArrayRef strides) {
  if (tensor.strides() == strides) return tensor;
  if (tensor.numel() < 2) return tensor.as_strided(tensor.sizes(), strides);  // operators read strides of empty tensors, too
  return at::empty_strided(tensor.sizes(), strides, tensor.options()).copy_(tensor);
}

/// Rank r's range, of this many elements, lies `longest` behind the one before: what was gathered is the tensor and padding.
bool follow_each_other(const ShardLayout& layout, int ranks, int64_t longest) {
  for (int rank = 0; rank < ranks; ++rank)
    if (layout.local_numel(rank) > 0 && layout.range(rank).begin != rank * longest) return false;
  return true;
}

/// All elements in the order of memory, which a flat layout cuts.
at::Tensor gather_in_memory(const DTensorSpec& spec, const at::Tensor& local, std::string_view operation) {
  const auto& [layout, group] = *spec.flat();
  if (group->size() == 1) return local.contiguous();
  int64_t longest = 0;
  for (int rank = 0; rank < group->size(); ++rank) longest = std::max(longest, layout.local_numel(rank));
  const auto all = at::empty({group->size(), longest}, local.options());
  if (longest > 0) {
    const auto own = all[group->rank()];
    own.narrow(0, 0, local.numel()).copy_(local);
    own.narrow(0, local.numel(), longest - local.numel()).zero_();
    awaited::all_gather(*group, all.view(-1), own, way_to(spec, replicated_everywhere(spec), operation).subject);
  }
  if (follow_each_other(layout, group->size(), longest)) return all.view(-1).narrow(0, 0, layout.numel());
  const auto in_memory = at::empty({layout.numel()}, local.options());
  for (int rank = 0; rank < group->size(); ++rank)
    in_memory.narrow(0, layout.range(rank).begin, layout.local_numel(rank))
        .copy_(all[rank].narrow(0, 0, layout.local_numel(rank)));
  return in_memory;
}

}  // namespace

at::Tensor full_of(const DTensorSpec& spec, const at::Tensor& local, std::string_view operation) {
  const at::NoGradGuard no_grad;
  // Offloaded: a group's collectives run on its mesh's device.
  const auto& mesh = spec.mesh();
  if (local.device().type() != mesh.device_type() && !local.is_meta())
    return full_of(spec, local.to(mesh.device()), operation).to(local.device());
  if (!spec.is_flat())
    return with_strides(redistribute_piece(local, way_to(spec, replicated_everywhere(spec), operation)), spec.strides());
  const auto in_memory = gather_in_memory(spec, local, operation);
  return in_memory.as_strided(spec.sizes(), spec.strides(), in_memory.storage_offset());
}

}  // namespace fsdp
