#include "fsdp/conversion.hpp"

#include <ATen/ATen.h>

#include "api/params/module_tree.hpp"
#include "base/require.hpp"
#include "param/replace_tensor.hpp"
#include "root/edit/group_conversion.hpp"

namespace fsdp {

namespace {

void check_target(const ModuleTree& tree, const GroupConversion& target) {
  require(!target.dtype || at::isFloatingType(*target.dtype),
          "fsdp::to: expected a floating-point dtype, found {}",
          c10::toString(target.dtype.value_or(at::kFloat)));
  if (!target.device) return;
  for (const auto& group : tree.groups) {
    const auto mesh_device = group->identity().mesh_info.mesh.device();
    const bool fits =
        *target.device == mesh_device || target.device->is_cpu() || target.device->is_meta();
    require(fits,
            "fsdp::to: '{}' is sharded over a mesh on {}; expected that device, the CPU or meta, "
            "found {}",
            group->name(), mesh_device.str(), target.device->str());
  }
}

void check_has_values(const std::vector<TreeEntry>& entries, const GroupConversion& target) {
  if (!target.device || target.device->is_meta()) return;
  for (const auto& entry : entries)
    require(!entry.tensor.is_meta(),
            "fsdp::to: {} is on the meta device and has no values to move; use fsdp::materialize",
            entry.name);
}

at::ScalarType target_dtype(const at::Tensor& tensor, const GroupConversion& target) {
  const bool casts = target.dtype && at::isFloatingType(tensor.scalar_type());
  return casts ? *target.dtype : tensor.scalar_type();
}

void convert_plain(const at::Tensor& tensor, c10::Device device, at::ScalarType dtype) {
  if (tensor.device() == device && tensor.scalar_type() == dtype) return;
  auto gradient = tensor.grad();
  // One whose dtype was asked for keeps it.
  const auto of_gradient = gradient.defined() && grad_dtype_of(tensor).is_set ? gradient.scalar_type() : dtype;
  if (gradient.defined()) gradient = device.is_meta() ? at::Tensor() : gradient.to(device, of_gradient);
  tensor.mutable_grad().reset();
  replace_tensor(tensor, tensor.detach().to(device, dtype));
  if (gradient.defined()) tensor.mutable_grad() = gradient;
}

/// The buffers that the policy keeps in a dtype of their own: only what they are saved in changes.
std::unordered_set<const c10::TensorImpl*> convert_cast_buffers(const ModuleTree& tree,
                                                                const GroupConversion& target) {
  std::unordered_set<const c10::TensorImpl*> cast;
  for (const auto& state : tree.states) {
    auto& precision = state->precision();
    for (const auto& entry : precision.cast_buffers())
      if (const auto buffer = entry.buffer.lock(); buffer.defined()) cast.insert(buffer.get());
    if (target.dtype) precision.set_own_dtype(*target.dtype);
  }
  return cast;
}

void convert(torch::nn::Module& module, GroupConversion target) {
  const auto tree = walk_tree(module, "fsdp::to");
  // An unindexed device names the mesh's where the mesh has it.
  for (const auto& group : tree.groups)
    if (const auto device = group->identity().mesh_info.mesh.device();
        target.device && !target.device->has_index() && target.device->type() == device.type())
      target.device = device;
  check_target(tree, target);
  check_has_values(tree.parameters, target);
  check_has_values(tree.buffers, target);
  for (const auto& group : tree.groups) check_convertible(*group, target);

  for (const auto& group : tree.groups) fsdp::convert(*group, target);
  torch::NoGradGuard no_grad;
  for (const auto& entry : tree.parameters)
    if (!entry.group)
      convert_plain(entry.tensor, target.device.value_or(entry.tensor.device()),
                    target_dtype(entry.tensor, target));
  const auto cast = convert_cast_buffers(tree, target);
  for (const auto& entry : tree.buffers)
    convert_plain(entry.tensor, target.device.value_or(entry.tensor.device()),
                  cast.contains(entry.tensor.unsafeGetTensorImpl())
                      ? entry.tensor.scalar_type()
                      : target_dtype(entry.tensor, target));
}

}  // namespace

void to(torch::nn::Module& module, c10::Device device) { convert(module, {.device = device}); }

void to(torch::nn::Module& module, at::ScalarType dtype) { convert(module, {.dtype = dtype}); }

void to(torch::nn::Module& module, c10::Device device, at::ScalarType dtype) {
  convert(module, {.device = device, .dtype = dtype});
}

at::ScalarType saved_dtype(const torch::nn::Module& module, const at::Tensor& buffer) {
  // Walking does not change the module; its tables are only not offered as const.
  for (const auto& state :
       walk_tree(const_cast<torch::nn::Module&>(module), "fsdp::saved_dtype").states)
    for (const auto& entry : state->precision().cast_buffers())
      if (entry.buffer.lock().get() == buffer.unsafeGetTensorImpl()) return entry.dtype;
  return buffer.scalar_type();
}

void to_cuda(torch::nn::Module& module, std::optional<c10::DeviceIndex> index) {
  to(module, index ? c10::Device(at::kCUDA, *index) : c10::Device(at::kCUDA));
}

}  // namespace fsdp
