#include "module/state/module_precision.hpp"

#include "root/edit/group_conversion.hpp"

namespace fsdp {

ModulePrecision::ModulePrecision(const MixedPrecisionPolicy& policy, const std::vector<Unit>& units)
    : full_precision_in_eval_(policy.full_precision_in_eval), buffer_dtype_(policy.buffer_dtype) {
  for (const auto& unit : units) modules_.push_back(unit.alive);
}

void ModulePrecision::move_buffers(const std::vector<at::Tensor>& buffers, c10::Device device) {
  torch::NoGradGuard no_grad;
  for (const auto& buffer : buffers) {
    const auto own = buffer.scalar_type();
    const auto to = buffer.is_meta() ? buffer.device() : device;
    const bool casts = buffer_dtype_ && at::isFloatingType(own);
    if (casts) cast_buffers_.emplace_back(buffer, own);
    const auto type = casts ? *buffer_dtype_ : own;
    if (buffer.device() != to || own != type) buffer.set_data(buffer.to(to, type));
  }
}

void ModulePrecision::set_own_dtype(at::ScalarType dtype) {
  for (auto& cast : cast_buffers_) cast.dtype = dtype;
}

bool ModulePrecision::wants_own_dtype() const {
  bool is_any_alive = false;
  for (const auto& weak : modules_) {
    const auto module = weak.lock();
    if (module && module->is_training()) return false;
    is_any_alive |= module != nullptr;
  }
  return is_any_alive ? full_precision_in_eval_ : computes_in_own_dtype_;
}

void ModulePrecision::follow_modes(const std::vector<OwnedGroup>& groups) {
  if (!full_precision_in_eval_) return;
  const bool own = wants_own_dtype();
  for (const auto& owned : groups)
    if (const auto group = owned.group.lock()) compute_in_own_dtype(*group, own);
  computes_in_own_dtype_ = own;
  follow_buffers();
}

void ModulePrecision::follow_buffers() const {
  torch::NoGradGuard no_grad;
  for (const auto& cast : cast_buffers_) {
    const at::Tensor buffer(cast.buffer.lock());
    const auto dtype = computes_in_own_dtype_ ? cast.dtype : buffer_dtype_.value_or(cast.dtype);
    if (buffer.defined() && buffer.scalar_type() != dtype) buffer.set_data(buffer.to(dtype));
  }
}

}  // namespace fsdp
