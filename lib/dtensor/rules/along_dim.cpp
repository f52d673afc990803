#include <ATen/ATen.h>

#include <algorithm>

#include "dtensor/rules/propagate.hpp"

// Softmax, sort, cumsum and their like: where the dimension that they work along is not cut, each rank has whole rows.
namespace fsdp {

namespace {

/// The dimensions that the operator works along; empty: all, or not known.
std::vector<int64_t> dims_along(const OperatorCall& call, int64_t ndim) {
  if (call.info().arguments.dim < 0) return {};
  const auto& value = call.operand(static_cast<size_t>(call.info().arguments.dim));
  std::vector<int64_t> dims;
  if (value.isInt()) dims = {value.toInt()};
  if (value.isIntList()) dims = value.toIntVector();
  for (auto& dim : dims) {
    dim += dim < 0 ? ndim : 0;
    if (dim < 0 || dim >= ndim) return {};
  }
  return dims;
}

bool has_more_tensors(const OperatorCall& call) {
  bool found = false;
  for (size_t i = 1; i < call.count(); ++i) for_tensors(call.operand(i), [&](const at::Tensor&, int64_t) { found = true; });
  return found;
}

/// A dimension that an operator reduces is gone from its results.
bool drops_dims(const OperatorCall& call) {
  const int keepdim = call.info().arguments.keepdim;
  return keepdim >= 0 ? !call.operand(static_cast<size_t>(keepdim)).toBool() : call.name() == "count_nonzero";
}

/// How a result is placed, of which a rank has `piece_sizes`: dimensions that are cut are the operand's. along: the dimension
/// that may be gone.
DTensorSpec::Ptr spec_of_result(const DTensorSpec& spec, c10::IntArrayRef piece_sizes, int64_t along) {
  auto sizes = piece_sizes.vec();
  auto placements = spec.placements();
  const bool is_gone = static_cast<int64_t>(sizes.size()) < spec.ndim();
  for (size_t m = 0; m < placements.size(); ++m) {
    const auto dim = sharded_dim(placements[m]);
    if (!dim) continue;
    if (!spec.is_cut(*dim) && is_gone) {  // a mesh dimension of one rank may name a dimension that is gone
      placements[m] = Replicate{};
      continue;
    }
    const int64_t now = is_gone && *dim > along ? *dim - 1 : *dim;
    if (spec.is_cut(*dim)) sizes[static_cast<size_t>(now)] = spec.sizes()[static_cast<size_t>(*dim)];
    set_sharded_dim(placements[m], now);
  }
  return spec_like(spec, std::move(sizes), std::move(placements));
}

/// What a rank gives the operator: its piece, or elements that nobody sees, see Note [Ranks without elements].
at::Tensor shown_piece(const at::Tensor& local) {
  if (local.numel() > 0) return local;
  auto sizes = local.sizes().vec();
  std::replace(sizes.begin(), sizes.end(), int64_t{0}, int64_t{1});
  return at::ones(sizes, local.options());
}

}  // namespace

bool run_along_dim(const OperatorCall& call) {
  if (!call.operand(0).isTensor() || has_more_tensors(call)) return false;
  const auto tensor = call.operand(0).toTensor();
  const auto* dtensor = DTensorImpl::of(tensor);
  if (dtensor == nullptr || !dtensor->has_piece() || dtensor->dim() == 0 || dtensor->numel() == 0) return false;
  const auto& spec = dtensor->spec();
  const auto dims = dims_along(call, spec.ndim());
  if (dims.empty() || (dims.size() > 1 && drops_dims(call))) return false;
  for (const auto dim : dims)
    if (spec.is_cut(dim)) return false;
  auto arguments = call.arguments();
  arguments[0] = shown_piece(dtensor->local());
  const bool lacks_elements = dtensor->local().numel() == 0;
  auto results = call.call(arguments);
  call.note_writes_of_nothing();
  call.give_results(std::move(results), [&](const at::Tensor& result, int64_t) {
    const auto placed = spec_of_result(spec, result.sizes(), dims[0]);
    if (placed->is_replicated()) return result;
    return make_dtensor(lacks_elements ? result.new_empty(placed->piece().sizes) : result, placed);
  });
  return true;
}

}  // namespace fsdp
