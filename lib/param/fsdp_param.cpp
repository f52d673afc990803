#include "param/fsdp_param.hpp"

#include <ATen/ATen.h>

#include <utility>

#include "base/require.hpp"
#include "dispatch/residency.hpp"
#include "dtensor/dtensor_impl.hpp"
#include "param/replace_tensor.hpp"
#include "tensor/shard_part.hpp"

namespace fsdp {

namespace {

void lay_out(ParamSpec& spec, ShardLayout layout) {
  spec.layout = std::move(layout);
  spec.local_sizes = spec.layout.local_sizes(spec.rank);
  spec.local_strides = spec.layout.local_strides(spec.rank);
}

ParamSpec completed(ParamSpec spec, const at::Tensor& unsharded_param) {
  spec.dtype = unsharded_param.scalar_type();
  lay_out(spec, std::move(spec.layout));
  return spec;
}

}  // namespace

FSDPParam::FSDPParam(ParamSpec spec, const at::Tensor& unsharded_param)
    : spec(completed(std::move(spec), unsharded_param)), unsharded(unsharded_param), settings(unsharded_param) {}

namespace {

/// spec: with the new name.
void rename_dtensor(const ParamSpec& spec, const ShardedTensor& sharded) {
  if (!spec.dtensor) return;
  spec.dtensor->rename(spec.name);
  if (const auto& shared = sharded.shared()) shared->set_spec(spec.dtensor);
  const auto registered = sharded.registered();
  if (auto* dtensor = registered.defined() ? DTensorImpl::of(registered) : nullptr) dtensor->renamed();
}

}  // namespace

void FSDPParam::rename(std::string name) {
  spec.name = std::move(name);
  rename_dtensor(spec, sharded);
  if (auto* storage = unsharded.storage()) storage->set_name(spec.name);
}

void FSDPParam::take_identity(const FSDPParam& other) {
  spec.dtype = other.spec.dtype;
  sharded.take(other.sharded);
  settings = other.settings;
}

void FSDPParam::move_away() {
  unsharded.move_away(name());
  sharded.move_away();
  lay_out(spec, ShardLayout(/*rows=*/int64_t{0}, layout().world_size()));
  settings.freeze();
  has_moved_away = true;
}

void FSDPParam::make_sharded_param(OwnerLink link, size_t index, const at::Tensor& piece) {
  sharded.make(spec, {std::move(link), index}, piece, settings, unsharded_param());
}

void FSDPParam::attach(const std::shared_ptr<ParamOwner>& owner, c10::Device device) {
  sharded.see_version();
  unsharded.attach(spec, owner, sharded.place(), device);
  if (sharded.shared()) sharded.shared()->join(unsharded_param(), SharedAutograd::Side::kUnsharded);
}

void FSDPParam::mark_written() {
  sharded.bump_version();
  sharded.see_version();
}

/// The operator has counted on the unsharded parameter.
void FSDPParam::mark_sharded_written() {
  sharded.bump_version();
  sharded.note_write();
}

void FSDPParam::reset_sharded_param(const at::Tensor& piece) {
  if (!sharded.was_replaced()) return;
  BelowResidency below;
  const auto tensor = local_tensor();
  auto values = tensor.detach();
  const bool is_whole = values.sizes() == c10::IntArrayRef(spec.sizes());
  const bool is_local = values.sizes() == c10::IntArrayRef(spec.local_sizes);
  const auto place = sharded.place();
  make_sharded_param(place.link, place.index, piece);
  require_state(is_whole || is_local,
                "{}: its sharded parameter was replaced by a tensor of sizes {}; expected this "
                "rank's part ({}) or the whole parameter ({}). The old values are back in place",
                name(), fmt::join(values.sizes(), "x"), fmt::join(spec.local_sizes, "x"), fmt::join(spec.sizes(), "x"));
  require_state(values.scalar_type() == spec.dtype,
                "{}: its dtype was changed from {} to {} after fully_shard; use fsdp::to(module, "
                "dtype), or write values with copy_. The old values are back in place",
                name(), c10::toString(spec.dtype), c10::toString(values.scalar_type()));
  require_state(values.device() == piece.device(),
                "{}: it was moved from {} to {} after fully_shard; use fsdp::to(module, device). The "
                "old values are back in place",
                name(), piece.device().str(), values.device().str());
  if (is_whole && !is_local) values = part_of(layout(), values, spec.rank);
  tensor.detach().copy_(values);
  sharded.bump_version();
}

void FSDPParam::convert(at::ScalarType dtype, at::ScalarType param_dtype, const at::Tensor& piece,
                        const std::shared_ptr<ParamOwner>& owner, c10::Device unsharded_device) {
  BelowResidency below;
  sync_requires_grad();  // making the sharded parameter again would undo what nobody has seen yet
  spec.dtype = dtype;
  if (const auto tensor = local_tensor(); tensor.defined()) {
    tensor.mutable_grad().reset();
    const auto place = sharded.place();
    make_sharded_param(place.link, place.index, piece);
    sharded.bump_version();
  }
  set_param_dtype(param_dtype, owner, unsharded_device);
}

void FSDPParam::set_param_dtype(at::ScalarType param_dtype, const std::shared_ptr<ParamOwner>& owner,
                                c10::Device unsharded_device) {
  BelowResidency below;
  spec.param_dtype = param_dtype;
  if (!unsharded.retire(name())) return;
  const auto tensor = unsharded_param();
  accumulated_grad(tensor).reset();
  replace_tensor(tensor, at::empty({0}, at::TensorOptions().dtype(param_dtype).device(unsharded_device)));
  attach(owner, unsharded_device);
  // A graph that saved the unsharded parameter itself is out of date, and is to say so.
  unsharded.bump_version();
}

void FSDPParam::set_unsharded_grad_dtype(const GradDtype& value) {
  const auto tensor = unsharded_param();
  if (unsharded.storage() != nullptr && tensor.defined()) settings.set_unsharded_grad_dtype(tensor, value);
}

}  // namespace fsdp
