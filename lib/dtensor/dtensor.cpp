#include "fsdp/dtensor.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/require.hpp"
#include "dtensor/dtensor_impl.hpp"
#include "dtensor/recorded.hpp"
#include "tensor/broadcast_whole.hpp"
#include "tensor/full_tensor.hpp"
#include "tensor/local_piece.hpp"
#include "tensor/piece.hpp"
#include "tensor/piece_map.hpp"
#include "tensor/redistribute/redistribute.hpp"
#include "tensor/strides.hpp"

namespace fsdp {
namespace {

void check_tensor(const at::Tensor& tensor, std::string_view subject) {
  require(tensor.defined(), "{}: expected a tensor, got an undefined one", subject);
  require(tensor.layout() == c10::kStrided, "{}: expected a dense tensor, got a sparse one; "
          "convert it with to_dense()", subject);
}

const DTensorImpl& impl_of(const at::Tensor& tensor, std::string_view subject) {
  require(tensor.defined(), "{}: expected a DTensor made with from_local or distribute_tensor, got an "
                            "undefined one", subject);
  auto* impl = DTensorImpl::of(tensor);
  require(impl != nullptr, "{}: expected a DTensor, got an ordinary tensor of sizes {}", subject, sizes_text(tensor.sizes()));
  impl->settle();
  require(!impl->is_window(), "{}: this view joins or splits a sharded dimension, so it has no local tensor; take "
                              "fsdp::full_tensor(tensor)", subject);
  return *impl;
}

/// How the gradient of what `way` leads to is placed: as asked, or by default.
std::vector<Placement> gradient_placements(std::vector<Placement> asked, const Redistribution& way,
                                           std::string_view subject) {
  if (asked.empty()) return default_gradient(way.to);
  const auto ndim = static_cast<int64_t>(way.sizes.size());
  asked = normalised(std::move(asked), way.mesh, ndim, fmt::format("{}: grad_placements", subject));
  for (size_t m = 0; m < asked.size(); ++m) {
    const bool fits = sharded_dim(way.to[m]) ? asked[m] == way.to[m]
                                             : asked[m] == Placement(Replicate{}) ||
                                                   asked[m] == Placement(Partial{});
    if (!fits) [[unlikely]]
      throw UsageError(fmt::format(
          "{}: expected grad_placements that are the result's where it is sharded, Replicate() or "
          "Partial(sum) elsewhere, got {} for a result placed as {}; every rank's gradient has the "
          "sizes of its piece of the result",
          subject, to_string(asked), to_string(way.to)));
  }
  return asked;
}

/// Partial values that are combined or made have to be ones that can be, and recorded.
void check_partials(const at::Tensor& tensor, const Redistribution& way, std::string_view subject) {
  for (size_t m = 0; m < way.from.size(); ++m) {
    if (way.from[m] == way.to[m]) continue;
    for (const Placement& placement : {way.from[m], way.to[m]}) {
      const auto* partial = std::get_if<Partial>(&placement);
      if (partial == nullptr || partial->op == ReduceOp::kSum) continue;
      if (tensor.is_complex()) [[unlikely]]
        throw UsageError(fmt::format("{}: {} is not defined for complex numbers, got {}", subject,
                                     to_string(placement), c10::toString(tensor.scalar_type())));
      if (is_recorded(tensor)) [[unlikely]]
        throw UsageError(fmt::format("{}: autograd does not support {}, and this rank's local tensor requires grad; detach it "
                                     "first",
                                     subject, to_string(placement)));
    }
  }
}

}  // namespace

DTensor::DTensor(at::Tensor tensor) : at::Tensor(std::move(tensor)) {
  require(!defined() || is_dtensor(*this), "DTensor: expected a DTensor, got an ordinary tensor of sizes {}; make one with "
          "DTensor::from_local or distribute_tensor", sizes_text(sizes()));
}

DTensor DTensor::from_local(at::Tensor local, DeviceMesh mesh, std::vector<Placement> placements,
                            at::OptionalIntArrayRef sizes, at::OptionalIntArrayRef strides) {
  check_tensor(local, "from_local");
  require(!is_dtensor(local), "from_local: expected this rank's piece, an ordinary tensor, got a DTensor");
  if (local.device().type() != mesh.device_type() && !local.is_meta()) [[unlikely]]
    throw UsageError(fmt::format(
        "from_local: expected a tensor on {}, the device type of {}, got one on {}; move it or make the "
        "mesh with that device type",
        c10::DeviceTypeName(mesh.device_type(), true), mesh.to_string(), local.device().str()));
  auto spec = spec_of_local(local, std::move(mesh), std::move(placements), sizes, strides, "from_local");
  if (is_recorded(local)) return DTensor(recorded_from_local(local, std::move(spec)));
  return DTensor(make_dtensor(local.requires_grad() ? local.detach() : std::move(local), std::move(spec),
                              WholeStorage::Message::kFull));
}

const DeviceMesh& DTensor::mesh() const { return impl_of(*this, "mesh").spec().mesh(); }
const std::vector<Placement>& DTensor::placements() const { return impl_of(*this, "placements").spec().placements(); }

at::Tensor DTensor::to_local(std::vector<Placement> grad_placements) const {
  const auto& impl = impl_of(*this, "to_local");
  if (!is_recorded(*this)) return impl.local();
  const auto way = way_to(impl.spec(), impl.spec().placements(), "to_local");
  return recorded_to_local(*this, gradient_placements(std::move(grad_placements), way, "to_local"));
}

std::vector<ElementRange> DTensor::element_ranges() const {
  const auto& spec = impl_of(*this, "element_ranges").spec();
  return fsdp::element_ranges(spec.sizes(), spec.mesh().shape(), spec.mesh().get_coordinate(), spec.placements());
}

namespace {

at::Tensor moved(const at::Tensor& tensor, std::vector<Placement> placements, std::vector<Placement> grad_placements,
                 const char* subject) {
  const auto& impl = impl_of(tensor, subject);
  const auto& spec = impl.spec();
  placements = normalised(std::move(placements), spec.mesh(), spec.ndim(), subject);
  auto way = way_to(spec, std::move(placements), subject);
  require(!spec.is_flat() || way.to == way.from, "{}: {} lies in a flat layout, which has no placements; take full_tensor()",
          subject, spec.name().empty() ? "this tensor" : spec.name());
  auto gradient = gradient_placements(std::move(grad_placements), way, subject);
  check_partials(tensor, way, subject);
  if (is_recorded(tensor) && !spec.is_flat() && way.from == way.to && gradient == default_gradient(way.to)) return tensor;
  if (is_recorded(tensor)) return recorded_redistribution(tensor, std::move(way), std::move(gradient));
  const at::NoGradGuard no_grad;
  auto local = spec.is_flat() ? full_of(spec, impl.local(), subject) : redistribute_piece(impl.local(), way);
  if (local.is_same(impl.local())) local = local.detach();
  return make_dtensor(std::move(local), spec_like(spec, spec.sizes(), way.to, spec.strides()), WholeStorage::Message::kFull);
}

}  // namespace

DTensor DTensor::redistribute(std::vector<Placement> placements, std::vector<Placement> grad_placements) const {
  return DTensor(moved(*this, std::move(placements), std::move(grad_placements), "redistribute"));
}

at::Tensor DTensor::full_tensor(std::vector<Placement> grad_placements) const {
  const auto* window = defined() ? DTensorImpl::of(*this) : nullptr;
  if (window != nullptr && window->is_window() && !is_recorded(*this)) return window->whole("full_tensor");
  const auto& spec = impl_of(*this, "full_tensor").spec();
  const auto everywhere = replicated_everywhere(spec);
  const auto whole = moved(*this, everywhere, grad_placements, "full_tensor");
  const auto local = is_recorded(whole) ? recorded_to_local(whole, grad_placements.empty() ? everywhere : grad_placements)
                                        : DTensorImpl::of(whole)->local();
  if (local.numel() < 2 || local.strides() == c10::IntArrayRef(spec.strides())) return local;
  return at::empty_strided(spec.sizes(), spec.strides(), local.options().requires_grad(false)).copy_(local);
}

bool is_dtensor(const at::Tensor& tensor) { return tensor.defined() && DTensorImpl::of(tensor) != nullptr; }

at::Tensor to_local(const at::Tensor& tensor) {
  return is_dtensor(tensor) ? impl_of(tensor, "to_local").local() : tensor;
}

DTensor distribute_tensor(const at::Tensor& tensor, DeviceMesh mesh, std::vector<Placement> placements,
                          DistributeSource source) {
  check_tensor(tensor, "distribute_tensor");
  placements = normalised(std::move(placements), mesh, tensor.dim(), "distribute_tensor");
  for (const Placement& placement : placements)
    if (std::holds_alternative<Partial>(placement))
      throw UsageError(fmt::format("distribute_tensor: expected Shard or Replicate, got {}; wrap each "
                                   "rank's summand with DTensor::from_local",
                                   to_string(placement)));
  const bool is_dense = tensor.is_non_overlapping_and_dense();
  auto spec = std::make_shared<const DTensorSpec>(std::move(mesh), std::move(placements), tensor.sizes().vec(),
                                                  is_dense ? tensor.strides().vec() : row_major_strides(tensor.sizes()));
  at::Tensor result;
  {
    const at::NoGradGuard no_grad;
    at::Tensor whole = tensor.detach();
    if (!whole.is_meta()) whole = whole.to(spec->mesh().device());
    if (source == DistributeSource::kBroadcastFromRank0) whole = broadcast_whole(whole, spec->mesh());
    result = make_dtensor(copy_part_of(*spec, whole), spec, WholeStorage::Message::kFull);
  }
  result.set_requires_grad(tensor.requires_grad());
  return DTensor(std::move(result));
}

}  // namespace fsdp
