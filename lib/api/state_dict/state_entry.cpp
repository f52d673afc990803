#include "api/state_dict/state_entry.hpp"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include "api/params/own_rows.hpp"
#include "dispatch/residency.hpp"
#include "group/unsharded_values.hpp"
#include "tensor/broadcast_whole.hpp"

namespace fsdp {

namespace {

at::Tensor on_cpu(const at::Tensor& tensor) {
  return at::empty_like(tensor, tensor.options().device(at::kCPU)).copy_(tensor);
}

/// The entry's part is the tensor's part: the same on all ranks, or the ranks would part ways.
bool is_spread_alike(const StateEntry& entry, const StateTensor& tensor) {
  if (!tensor.param) return false;
  if (!entry.dtensor.defined())
    return entry.ranges == ranges_of(*tensor.param) && (entry.cut == 0 || entry.cut == cut_of(*tensor.param));
  const auto& layout = tensor.param->param().layout();
  return !layout.is_flat() && entry.dtensor.mesh() == mesh_of(*tensor.param) &&
         entry.dtensor.placements() == placements_of(*tensor.param);
}

void write_own(const StateTensor& tensor, const at::Tensor& whole) {
  at::NoGradGuard no_grad;
  auto local = tensor.local;
  local.copy_(tensor.param ? own_of_whole(*tensor.param, whole) : whole);
}

}  // namespace

StateEntry save_entry(const StateTensor& tensor, const StateDictOptions& options, bool keeps) {
  at::NoGradGuard no_grad;
  StateEntry entry{.value = {}, .sizes = tensor.sizes().vec()};
  const bool is_full = options.kind == StateDictKind::kFull;
  if (tensor.param && is_full) {
    auto whole = full_values(*tensor.param->group, tensor.param->index, tensor.local);
    if (keeps) entry.value = options.cpu_offload ? whole.cpu() : whole;
    return entry;
  }
  if (!keeps) return entry;
  const auto local = tensor.local.detach();
  entry.value = options.cpu_offload ? on_cpu(local) : is_full ? local.clone() : local;
  if (!tensor.param) return entry;
  entry.is_sharded = true;
  entry.ranges = ranges_of(*tensor.param);
  entry.cut = cut_of(*tensor.param);
  const auto& mesh = tensor.param->group->identity().mesh_info.mesh;
  // A flat part is no DTensor's; its ranges say what it is.
  const bool is_flat = tensor.param->param().layout().is_flat();
  if (options.kind == StateDictKind::kSharded && !is_flat && entry.value.device().type() == mesh.device_type())
    entry.dtensor = as_dtensor(*tensor.param, entry.value);
  return entry;
}

std::string misfit(const StateEntry& entry, const StateTensor& tensor) {
  if (c10::IntArrayRef(entry.sizes) != tensor.sizes())
    return fmt::format("has sizes ({}), expected ({})", fmt::join(entry.sizes, ", "),
                       fmt::join(tensor.sizes(), ", "));
  const auto from = entry.value.scalar_type(), to = tensor.local.scalar_type();
  if (!c10::canCast(from, to))
    return fmt::format("is {}, which cannot be converted to {}", c10::toString(from), c10::toString(to));
  if (!entry.is_sharded) return "";
  if (entry.dtensor.defined() && !is_spread_alike(entry, tensor)) return "";
  if (!is_spread_alike(entry, tensor))
    return "is another rank's part, or of another layout; save a full or sharded dict instead";
  if (entry.value.sizes() != tensor.local.sizes())
    return fmt::format("has a local part of sizes ({}), expected ({})", fmt::join(entry.value.sizes(), ", "),
                       fmt::join(tensor.local.sizes(), ", "));
  return "";
}

void load_entry(const StateEntry& entry, const StateTensor& tensor) {
  if (!entry.is_sharded) return write_own(tensor, entry.value);
  if (!is_spread_alike(entry, tensor)) return write_own(tensor, entry.dtensor.full_tensor());
  at::NoGradGuard no_grad;
  auto local = tensor.local;
  local.copy_(entry.value);
}

void load_entry_from_first(const StateEntry* entry, const StateTensor& tensor, const DeviceMesh& mesh,
                           const std::string& name) {
  at::NoGradGuard no_grad;
  const auto whole = at::empty(
      tensor.sizes(), at::TensorOptions().dtype(tensor.local.scalar_type()).device(mesh.device()));
  if (is_first_rank(mesh)) whole.copy_(entry->value);
  broadcast_from_first(whole, mesh, name);
  write_own(tensor, whole);
}

}  // namespace fsdp
