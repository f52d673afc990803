#include "fsdp/parameters.hpp"

#include <algorithm>

#include "api/params/find_param.hpp"
#include "base/require.hpp"
#include "base/stable_hash.hpp"
#include "dtensor/dtensor_impl.hpp"
#include "fsdp/local_ranges.hpp"
#include "group/unsharded_values.hpp"
#include "param/param_placements.hpp"
#include "tensor/shard_part.hpp"

namespace fsdp {

namespace {

FoundParam expect_param(const at::Tensor& tensor, const char* caller) {
  auto found = find_param(tensor);
  require(found.has_value(),
          "{}: expected a parameter of a sharded module, or the tensor its member holds; found {}",
          caller, tensor.defined() ? "another tensor of sizes " + c10::str(tensor.sizes())
                                   : std::string("an undefined tensor"));
  return *found;
}

}  // namespace

std::vector<Placement> placements_of(const FoundParam& found) {
  return placements_of(found.param().spec, found.group->identity().mesh_info);
}

const DeviceMesh& mesh_of(const FoundParam& found) {
  return mesh_of(found.param().spec, found.group->identity().mesh_info);
}

c10::IntArrayRef whole_sizes(const FoundParam& found) { return whole_sizes(found.param().spec); }

c10::IntArrayRef whole_strides(const FoundParam& found) { return whole_strides(found.param().spec); }

std::vector<ElementRange> ranges_of(const FoundParam& found) {
  auto ranges = element_ranges(found.param().layout(), found.group->identity().mesh_info.shard_rank());
  const auto& part = found.param().spec.reach.part;
  return part ? part->in_whole(ranges) : ranges;
}

uint64_t cut_of(const FoundParam& found) {
  uint64_t hash = cut_hash(found.param().layout());
  const auto& part = found.param().spec.reach.part;
  const bool is_cut_further = part && !part->is_whole();
  if (is_cut_further)
    for (const auto& placement : part->placements) hash = mixed_hash(hash, stable_hash(to_string(placement)));
  if (is_cut_further || found.group->identity().mesh_info.shard_size() > 1) {
    const auto& mesh = mesh_of(found);
    for (const int64_t size : mesh.shape())
      if (size > 1) hash = mixed_hash(hash, static_cast<uint64_t>(size));
    for (const int rank : mesh.ranks()) hash = mixed_hash(hash, static_cast<uint64_t>(rank));
  }
  return std::max<uint64_t>(hash, 1);
}

DTensor as_dtensor(const FoundParam& found, const at::Tensor& local) {
  require(!found.param().layout().is_flat(),
          "{}: has the flat layout, which shards no dimension, so there is no DTensor for it; use full_tensor or full_grad for "
          "the whole, local_ranges for this rank's elements",
          found.param().name());
  const auto& known = found.param().spec.dtensor;
  const auto spec = known ? known : dtensor_spec(found.param().spec, found.group->identity().mesh_info);
  return DTensor(make_dtensor(local, spec, WholeStorage::Message::kFull));
}

at::Tensor sharded(const at::Tensor& tensor) { return expect_param(tensor, "sharded").param().sharded_param(); }

at::Tensor unsharded(const at::Tensor& tensor) {
  return expect_param(tensor, "unsharded").param().unsharded_param();
}

at::Tensor registered(const at::Tensor& tensor) {
  const auto found = find_param(tensor);
  const auto parameter = found ? found->param().sharded_param() : at::Tensor();
  return parameter.defined() ? parameter : tensor;
}

bool is_fsdp_parameter(const at::Tensor& tensor) { return find_param(tensor).has_value(); }

std::vector<ElementRange> local_ranges(const at::Tensor& tensor) {
  return ranges_of(expect_param(tensor, "local_ranges"));
}

DTensor dtensor_of(const at::Tensor& tensor) {
  const auto found = expect_param(tensor, "dtensor_of");
  return as_dtensor(found, plain_view(found.param().local_tensor()));
}

DTensor grad_dtensor_of(const at::Tensor& tensor) {
  const auto found = expect_param(tensor, "grad_dtensor_of");
  const auto gradient = found.param().local_tensor().grad();
  return gradient.defined() ? as_dtensor(found, gradient) : DTensor();
}

namespace {

/// On the host of what is offloaded, as DTensor::full_tensor is.
at::Tensor full_beside(const FoundParam& found, const at::Tensor& local) {
  return full_values(*found.group, found.index, local).to(local.device());
}

}  // namespace

at::Tensor full_tensor(const at::Tensor& tensor) {
  if (is_dtensor(tensor) && !find_param(tensor)) return DTensor(tensor.detach()).full_tensor();
  const auto found = expect_param(tensor, "full_tensor");
  return full_beside(found, plain_view(found.param().local_tensor()));
}

at::Tensor full_grad(const at::Tensor& tensor) {
  const auto found = expect_param(tensor, "full_grad");
  const auto gradient = found.param().local_tensor().grad();
  return gradient.defined() ? full_beside(found, gradient) : at::Tensor();
}

}  // namespace fsdp
