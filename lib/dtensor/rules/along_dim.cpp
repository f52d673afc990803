#include <ATen/ATen.h>

#include "dtensor/rules/propagate.hpp"

// Softmax, sort, cumsum and their like: where the dimension that they work along is not cut, each rank has whole rows.
namespace fsdp {

namespace {

/// The dimensions that the operator works along; empty: all, or not known.
std::vector<int64_t> dims_along(const OperatorCall& call, int64_t ndim) {
  if (call.form().dim < 0) return {};
  const auto& value = call.operand(static_cast<size_t>(call.form().dim));
  std::vector<int64_t> dims;
  if (value.isInt()) dims = {value.toInt()};
  if (value.isIntList()) dims = value.toIntVector();
  for (auto& dim : dims) {
    dim += dim < 0 ? ndim : 0;
    if (dim < 0 || dim >= ndim) return {};
  }
  return dims;
}

}  // namespace

bool run_along_dim(const OperatorCall& call) {
  if (!call.operand(0).isTensor()) return false;
  const auto tensor = call.operand(0).toTensor();
  const auto* dtensor = DTensorImpl::of(tensor);
  if (dtensor == nullptr || !dtensor->has_piece() || dtensor->dim() == 0 || dtensor->numel() == 0) return false;
  for (size_t i = 1; i < call.count(); ++i) {
    bool has_tensor = false;
    for_tensors(call.operand(i), [&](const at::Tensor&, int64_t) { has_tensor = true; });
    if (has_tensor) return false;
  }
  const auto& spec = dtensor->spec();
  const auto dims = dims_along(call, spec.ndim());
  if (dims.empty()) return false;
  for (const auto dim : dims)
    if (spec.is_cut(dim)) return false;
  const bool drops = [&] {  // a dimension that an operator reduces is gone from its results
    const int keepdim = call.form().keepdim;
    return keepdim >= 0 && !call.operand(static_cast<size_t>(keepdim)).toBool();
  }();
  if (dims.size() > 1 && drops) return false;
  auto arguments = call.arguments();
  arguments[0] = dtensor->local();
  auto results = call.call(std::move(arguments));
  call.give_results(std::move(results), [&](const at::Tensor& result, int64_t) {
    auto sizes = result.sizes().vec();
    auto placements = spec.placements();
    const int64_t shift = result.dim() < spec.ndim() ? dims[0] : spec.ndim();  // dimensions from here on moved down
    for (auto& placement : placements) {
      const auto dim = sharded_dim(placement);
      if (!dim) continue;
      const int64_t now = *dim > shift ? *dim - 1 : *dim;
      if (spec.is_cut(*dim)) sizes[static_cast<size_t>(now)] = spec.sizes()[static_cast<size_t>(*dim)];
      if (auto* shard = std::get_if<Shard>(&placement)) shard->dim = now;
      if (auto* strided = std::get_if<StridedShard>(&placement)) strided->dim = now;
    }
    // A mesh dimension of one rank may name a dimension that is gone.
    for (size_t m = 0; m < placements.size(); ++m)
      if (spec.mesh().shape()[m] == 1 && sharded_dim(placements[m]) && result.dim() < spec.ndim()) placements[m] = Replicate{};
    const auto placed = spec.of(std::move(sizes), std::move(placements));
    return placed->is_replicated() ? result : make_dtensor(result, placed);
  });
  return true;
}

}  // namespace fsdp
