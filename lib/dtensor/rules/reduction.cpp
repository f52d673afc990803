#include <ATen/ATen.h>

#include <cmath>

#include "dtensor/rules/propagate.hpp"

// Reductions: of each rank's piece first, then of what the ranks that cut a reduced dimension have.
namespace fsdp {

namespace {

/// One call, read.
struct Reduction {
  std::vector<int64_t> dims;  ///< that are reduced, ascending; all of them for a full one
  bool is_full = false;
  bool keeps_dims = false;
  Combination combination;
  at::ScalarType partial_dtype;  ///< that ranks compute in

  bool reduces(int64_t dim) const { return std::find(dims.begin(), dims.end(), dim) != dims.end(); }
};

std::vector<int64_t> dims_of(const OperatorCall& call, int64_t ndim) {
  std::vector<int64_t> dims;
  if (const int at = call.info().arguments.dim; at >= 0) {
    const auto& value = call.operand(static_cast<size_t>(at));
    if (value.isInt()) dims = {value.toInt()};
    if (value.isIntList()) dims = value.toIntVector();
  }
  for (auto& dim : dims) dim += dim < 0 ? ndim : 0;
  if (dims.empty())
    for (int64_t dim = 0; dim < ndim; ++dim) dims.push_back(dim);
  std::sort(dims.begin(), dims.end());
  return dims;
}

/// An empty list, which to `any` and `all` is none, to others all dimensions.
bool names_no_dim(const OperatorCall& call) {
  if (call.info().arguments.dim < 0) return false;
  const auto& value = call.operand(static_cast<size_t>(call.info().arguments.dim));
  return value.isIntList() && value.toIntVector().empty();
}

std::optional<Combination::Kind> kind_of(std::string_view name) {
  using enum Combination::Kind;
  if (name == "sum" || name == "mean") return kSum;
  if (name == "prod") return kProd;
  if (name == "max" || name == "amax") return kMax;
  if (name == "min" || name == "amin") return kMin;
  if (name == "any") return kAny;
  if (name == "all") return kAll;
  if (name == "norm" || name == "linalg_vector_norm") return kNorm;
  return std::nullopt;
}

/// The dtype of the whole reduction's result, and that of a rank's part, which is not rounded twice.
bool set_dtypes(Reduction& reduction, const OperatorCall& call, at::ScalarType of_operand) {
  using enum Combination::Kind;
  const auto kind = reduction.combination.kind;
  const int at = call.info().arguments.dtype;
  auto result = of_operand;
  if ((kind == kSum || kind == kProd) && at::isIntegralType(of_operand, /*includeBool=*/true) && call.name() != "mean")
    result = at::kLong;
  if (kind == kAny || kind == kAll) result = of_operand == at::kByte ? at::kByte : at::kBool;
  if (at >= 0 && call.operand(static_cast<size_t>(at)).isInt()) result = call.operand(static_cast<size_t>(at)).toScalarType();
  if (at::isComplexType(of_operand) || at::isComplexType(result)) return false;
  if (call.name() == "mean" && !at::isFloatingType(result)) return false;
  // A norm refuses to round its operand to another dtype: let the operator say so.
  if (kind == kNorm && (!at::isFloatingType(of_operand) || at::promoteTypes(of_operand, result) != result)) return false;
  reduction.combination.dtype = result;
  reduction.partial_dtype = result;
  const bool rounds = kind == kSum || kind == kProd || kind == kNorm;
  if (rounds && at::isReducedFloatingType(result)) reduction.partial_dtype = at::kFloat;
  return true;
}

std::optional<Reduction> read(const OperatorCall& call, const DTensorSpec& spec, at::ScalarType dtype) {
  Reduction reduction;
  const auto kind = kind_of(call.name());
  if (!kind) return std::nullopt;
  reduction.combination.kind = *kind;
  if (*kind == Combination::Kind::kNorm) {
    const auto& p = call.operand(1);
    reduction.combination.p = p.isNone() ? 2 : p.toScalar().toDouble();
    // p = 0 counts, and a negative one has no neutral element but for the smallest.
    if (!(reduction.combination.p > 0) && !std::isinf(reduction.combination.p)) return std::nullopt;
  }
  if ((*kind == Combination::Kind::kAny || *kind == Combination::Kind::kAll) && names_no_dim(call)) return std::nullopt;
  reduction.dims = dims_of(call, spec.ndim());
  for (const auto dim : reduction.dims)
    if (dim < 0 || dim >= spec.ndim()) return std::nullopt;
  if (std::adjacent_find(reduction.dims.begin(), reduction.dims.end()) != reduction.dims.end()) return std::nullopt;
  reduction.is_full = static_cast<int64_t>(reduction.dims.size()) == spec.ndim();
  const int keepdim = call.info().arguments.keepdim;
  reduction.keeps_dims = keepdim >= 0 && call.operand(static_cast<size_t>(keepdim)).toBool();
  if (!set_dtypes(reduction, call, dtype)) return std::nullopt;
  if (call.name() == "mean")
    for (const auto dim : reduction.dims) reduction.combination.divisor *= spec.sizes()[static_cast<size_t>(dim)];
  return reduction;
}

/// A rank's part, with the reduced dimensions kept.
at::Tensor part_of_piece(const Reduction& reduction, const at::Tensor& local) {
  if (local.numel() == 0) part_of_piece(reduction, with_elements(local, /*is_scalar=*/reduction.dims.empty()));
  using enum Combination::Kind;
  const auto& how = reduction.combination;
  const auto dtype = reduction.partial_dtype;
  auto sizes = local.sizes().vec();
  bool is_empty = false;
  for (const auto dim : reduction.dims) {
    if (static_cast<size_t>(dim) >= sizes.size()) continue;  // of a 0-dim tensor
    is_empty |= sizes[static_cast<size_t>(dim)] == 0;
    sizes[static_cast<size_t>(dim)] = 1;
  }
  if (local.dim() > 0 && reduction.dims.empty()) is_empty = true;  // this rank has not got the one element
  if (is_empty) return how.neutral(reduction.dims.empty() ? std::vector<int64_t>() : sizes, local.options().dtype(dtype));
  const at::IntArrayRef dims(reduction.dims);
  switch (how.kind) {
    case kSum: return at::sum(local, dims, /*keepdim=*/true, dtype);
    case kMax: return at::amax(local, dims, true);
    case kMin: return at::amin(local, dims, true);
    case kNorm: return at::linalg_vector_norm(local, how.p, dims, true, dtype);
    default: break;
  }
  auto result = local;
  if (how.kind == kProd && reduction.dims.empty()) return result.to(dtype);
  if (reduction.dims.empty()) return how.kind == kAny ? at::any(result).to(dtype) : at::all(result).to(dtype);
  for (const auto dim : reduction.dims) {
    if (how.kind == kProd) result = at::prod(result, dim, true, dtype);
    if (how.kind == kAny) result = at::any(result, dim, true);
    if (how.kind == kAll) result = at::all(result, dim, true);
  }
  return result.to(dtype);
}

/// The groups over whose ranks a reduced dimension is cut.
std::vector<std::shared_ptr<Communicator>> groups_of(const Reduction& reduction, const DTensorSpec& spec) {
  if (spec.ndim() == 0) return spec.groups_cutting({0});
  return spec.groups_cutting(reduction.dims);
}

/// How what is left is placed: mesh dimensions that cut a reduced dimension replicate, others cut what they did.
DTensorSpec::Ptr spec_of_result(const Reduction& reduction, const DTensorSpec& spec) {
  std::vector<int64_t> sizes;
  std::vector<int64_t> new_dim;
  for (int64_t dim = 0; dim < spec.ndim(); ++dim) {
    new_dim.push_back(static_cast<int64_t>(sizes.size()));
    if (!reduction.reduces(dim))
      sizes.push_back(spec.sizes()[static_cast<size_t>(dim)]);
    else if (reduction.keeps_dims)
      sizes.push_back(1);
  }
  auto placements = spec.placements();
  for (auto& placement : placements)
    if (const auto dim = sharded_dim(placement)) {
      if (spec.ndim() == 0 || reduction.reduces(*dim))
        placement = Replicate{};
      else
        set_sharded_dim(placement, new_dim[static_cast<size_t>(*dim)]);
    }
  return spec_like(spec, std::move(sizes), std::move(placements));
}

at::Tensor with_dims(const Reduction& reduction, const at::Tensor& kept) {
  if (reduction.keeps_dims) return kept;
  if (reduction.is_full) return kept.reshape({});  // of a flat layout, too, whose pieces have one dimension
  auto sizes = kept.sizes().vec();
  for (size_t i = reduction.dims.size(); i-- > 0;) sizes.erase(sizes.begin() + reduction.dims[i]);
  return kept.reshape(sizes);
}

std::string subject(const OperatorCall& call, const DTensorSpec& spec) {
  const std::string name(call.name());
  return spec.name().empty() ? name : name + " of " + spec.name();
}

at::Tensor part_of_norm(const Reduction& reduction, const DTensorImpl& dtensor) {
  const auto& local = dtensor.local();
  if (local.numel() > 0 || dtensor.numel() == 0) return at::linalg_vector_norm(local, reduction.combination.p);
  return reduction.combination.neutral({}, local.options());  // of an infinite norm the operator has none
}

}  // namespace

bool run_reduction(const OperatorCall& call) {
  const auto tensor = call.operand(0).toTensor();
  const auto* dtensor = DTensorImpl::of(tensor);
  if (dtensor == nullptr || !dtensor->has_piece() || dtensor->numel() == 0) return false;
  const auto& spec = dtensor->spec();
  const auto reduction = read(call, spec, tensor.scalar_type());
  if (!reduction) return false;
  const at::NoGradGuard no_grad;
  if (spec.is_flat() && (!reduction->is_full || reduction->keeps_dims)) return false;
  auto of_piece = *reduction;
  if (spec.is_flat()) of_piece.dims = {0};  // whose pieces are 1-D
  const auto part = part_of_piece(of_piece, dtensor->local());
  const auto groups = groups_of(*reduction, spec);
  const auto placed = spec_of_result(*reduction, spec);
  if (reduction->is_full && !groups.empty() && !reduction->keeps_dims) {
    call.give(make_dtensor(
        PartialScalar::wait(part.reshape({}), reduction->combination, groups, subject(call, spec)), placed));
    return true;
  }
  const auto all = groups.empty() ? part.unsqueeze(0) : gather_parts(part, groups, subject(call, spec));
  const auto result = with_dims(*reduction, reduction->combination.combine(all));
  call.give(placed->is_replicated() ? result : make_dtensor(result, placed));
  return true;
}

bool run_dot(const OperatorCall& call) {
  const auto one = call.operand(0).toTensor(), other = call.operand(1).toTensor();
  const auto *a = DTensorImpl::of(one), *b = DTensorImpl::of(other);
  if (a == nullptr || b == nullptr || !a->has_piece() || !b->has_piece() || !a->spec().is_placed_as(b->spec())) return false;
  if (one.is_complex() || one.dim() != 1 || one.scalar_type() != other.scalar_type()) return false;
  const at::NoGradGuard no_grad;
  Reduction reduction{.dims = {0}, .is_full = true, .keeps_dims = false, .combination = {.dtype = one.scalar_type()},
                      .partial_dtype = one.scalar_type()};
  const auto part = call.call_for_tensor({a->local(), b->local()});
  const auto groups = groups_of(reduction, a->spec());
  call.give(groups.empty() ? part
                           : make_dtensor(PartialScalar::wait(part, reduction.combination, groups, subject(call, a->spec())),
                                          spec_of_result(reduction, a->spec())));
  return true;
}

bool run_foreach_norm(const OperatorCall& call) {
  const auto elements = call.operand(0).toListRef();
  const double p = call.operand(1).toScalar().toDouble();
  if (!(p > 0)) return false;
  for (const auto& element : elements) {
    const auto* dtensor = DTensorImpl::of(element.toTensor());
    if (dtensor == nullptr || !dtensor->has_piece() || !at::isFloatingType(element.toTensor().scalar_type())) return false;
  }
  if (call.count() > 2 && !call.operand(2).isNone()) return false;
  const at::NoGradGuard no_grad;
  c10::List<at::Tensor> norms;
  for (const auto& element : elements) {
    const auto& dtensor = *DTensorImpl::of(element.toTensor());
    Reduction reduction{.dims = {}, .is_full = true, .keeps_dims = false,
                        .combination = {.kind = Combination::Kind::kNorm, .p = p, .dtype = element.toTensor().scalar_type()},
                        .partial_dtype = element.toTensor().scalar_type()};
    for (int64_t dim = 0; dim < dtensor.dim(); ++dim) reduction.dims.push_back(dim);
    const auto groups = groups_of(reduction, dtensor.spec());
    const auto part = part_of_norm(reduction, dtensor);
    norms.push_back(groups.empty() ? part
                                   : make_dtensor(PartialScalar::wait(part, reduction.combination, groups,
                                                                      subject(call, dtensor.spec())),
                                                  spec_of_result(reduction, dtensor.spec())));
  }
  call.give(std::move(norms));
  return true;
}

}  // namespace fsdp
