#include "group/unsharded_values.hpp"

#include <ATen/ATen.h>

#include "dispatch/residency.hpp"
#include "group/param_group.hpp"
#include "param/param_placements.hpp"
#include "tensor/full_tensor.hpp"

namespace fsdp {

namespace {

constexpr auto kOperation = "full_tensor";

/// A tensor that is as large as its memory, and shares it with nobody who wrote `local`: files have whole storages.
at::Tensor in_own_memory(const at::Tensor& whole, const at::Tensor& local) {
  return whole.storage().nbytes() == whole.nbytes() && !whole.is_alias_of(local) ? whole : whole.clone();
}

}  // namespace

at::Tensor unsharded_values(const ParamGroup& group, size_t index, const at::Tensor& local) {
  BelowResidency below;
  const auto& info = group.identity().mesh_info;
  const auto spec = data_parallel_spec(group.params()[index].spec, info);
  const auto sent = local.is_meta() ? local : local.to(info.mesh.device());
  return in_own_memory(full_of(*spec, sent, kOperation), local);
}

at::Tensor full_values(const ParamGroup& group, size_t index, const at::Tensor& local) {
  BelowResidency below;
  auto values = unsharded_values(group, index, local);
  const auto& param = group.params()[index].spec;
  if (!param.reach.part) return values;
  // Behind the data-parallel ranks, which are the farther ones: so each element travels between them once.
  return in_own_memory(full_of(param.reach.part->spec(param.name), values, kOperation), local);
}

}  // namespace fsdp
