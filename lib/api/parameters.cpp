#include "fsdp/parameters.hpp"

#include <ATen/ATen.h>

#include <algorithm>

#include "api/find_param.hpp"
#include "base/require.hpp"
#include "fsdp/local_ranges.hpp"
#include "param/residency.hpp"
#include "tensor/strides.hpp"

namespace fsdp {

std::optional<FoundParam> find_param(const at::Tensor& tensor) {
  if (!tensor.defined()) return std::nullopt;
  auto* storage = KeyedStorage::of(tensor.unsafeGetTensorImpl());
  if (storage == nullptr || storage->owner() == nullptr) return std::nullopt;
  auto& group = static_cast<ParamGroup&>(*storage->owner());
  auto& param = group.params()[storage->index()];
  const bool is_handle = storage->kind() == KeyedStorage::Kind::kHandle;
  const auto identity = is_handle ? param.handle() : param.registered();
  // A view of either is neither.
  if (!identity.is_same(tensor)) return std::nullopt;
  return FoundParam{group.shared_from_this(), storage->index(), is_handle};
}

namespace {

FoundParam expect_param(const at::Tensor& tensor, const char* caller) {
  auto found = find_param(tensor);
  require(found.has_value(),
          "{}: expected a parameter of a sharded module, or the tensor its member holds; found {}",
          caller, tensor.defined() ? "another tensor of sizes " + c10::str(tensor.sizes())
                                   : std::string("an undefined tensor"));
  return *found;
}

DTensor joined(const FoundParam& found, const at::Tensor& local, const char* caller) {
  const auto& param = found.param();
  const auto& layout = param.layout();
  require(!layout.is_flat(),
          "{}: '{}' is in a flat layout, which cuts no dimension; use full_tensor or full_grad for the "
          "whole, local_ranges for this rank's elements",
          caller, param.name());
  const auto& info = found.group->config().mesh_info;
  auto placements = info.placements();
  for (auto& placement : placements)
    if (auto* shard = std::get_if<Shard>(&placement)) shard->dim = layout.dim();
  return DTensor::from_local(local, info.mesh, std::move(placements), param.sizes(), param.strides());
}

/// Every rank's elements, each padded to the most that one holds, put where they belong.
at::Tensor gather_flat(const FoundParam& found, const at::Tensor& local) {
  const auto& param = found.param();
  const auto& layout = param.layout();
  auto& group = *found.group->config().mesh_info.shard_group;
  auto whole = at::empty_strided(param.sizes(), param.strides(), local.options());
  const auto elements = in_memory_order(whole, param.strides());
  int64_t longest = 0;
  for (int rank = 0; rank < group.size(); ++rank) longest = std::max(longest, layout.rows(rank));
  if (longest == 0) return whole;
  const auto all = at::zeros({group.size(), longest}, local.options());
  const auto own = all[group.rank()];
  own.narrow(0, 0, local.numel()).copy_(local);
  if (group.size() > 1) group.start_all_gather(all.view({-1}), own, param.name())->wait();
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto held = layout.range(rank);
    elements.narrow(0, held.begin, held.count()).copy_(all[rank].narrow(0, 0, held.count()));
  }
  return whole;
}

at::Tensor gather(const FoundParam& found, const at::Tensor& local, const char* caller) {
  BelowResidency below;
  return found.param().layout().is_flat() ? gather_flat(found, local)
                                          : joined(found, local, caller).full_tensor();
}

}  // namespace

at::Tensor sharded(const at::Tensor& tensor) { return expect_param(tensor, "sharded").param().registered(); }

at::Tensor handle_of(const at::Tensor& tensor) {
  return expect_param(tensor, "handle_of").param().handle();
}

bool is_fsdp_parameter(const at::Tensor& tensor) { return find_param(tensor).has_value(); }

std::vector<ElementRange> local_ranges(const at::Tensor& tensor) {
  const auto found = expect_param(tensor, "local_ranges");
  return found.param().layout().element_ranges(found.group->config().mesh_info.shard_rank());
}

DTensor dtensor_of(const at::Tensor& tensor) {
  const auto found = expect_param(tensor, "dtensor_of");
  return joined(found, plain_view(found.param().registered()), "dtensor_of");
}

DTensor grad_dtensor_of(const at::Tensor& tensor) {
  const auto found = expect_param(tensor, "grad_dtensor_of");
  const auto gradient = found.param().registered().grad();
  return gradient.defined() ? joined(found, gradient, "grad_dtensor_of") : DTensor();
}

at::Tensor full_tensor(const at::Tensor& tensor) {
  const auto found = expect_param(tensor, "full_tensor");
  return gather(found, plain_view(found.param().registered()), "full_tensor");
}

at::Tensor full_grad(const at::Tensor& tensor) {
  const auto found = expect_param(tensor, "full_grad");
  const auto gradient = found.param().registered().grad();
  return gradient.defined() ? gather(found, gradient, "full_grad") : at::Tensor();
}

}  // namespace fsdp
