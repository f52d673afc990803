#include "shown/shown_registry.hpp"

#include "shown/shown_param.hpp"

namespace fsdp::python {

// Never destroyed: parameters may outlive it.
ShownRegistry& shown_registry() {
  static auto* registry = new ShownRegistry;
  return *registry;
}

void ShownRegistry::add(const std::shared_ptr<ShownParam>& shown) {
  by_sharded_param_[shown->sharded().sharded_param().unsafeGetTensorImpl()] = shown;
}

void ShownRegistry::remove(const ShownParam& shown) {
  by_sharded_param_.erase(shown.sharded().sharded_param().unsafeGetTensorImpl());
  for (const auto& entry : shown.forms().entries().all()) by_place_.erase(entry.place);
}

std::shared_ptr<ShownParam> ShownRegistry::find(const at::Tensor& sharded_param) const {
  const auto found = by_sharded_param_.find(sharded_param.unsafeGetTensorImpl());
  return found == by_sharded_param_.end() ? nullptr : found->second.lock();
}

std::unordered_map<const c10::TensorImpl*, std::shared_ptr<ShownParam>> ShownRegistry::all_by_dtensor() const {
  std::unordered_map<const c10::TensorImpl*, std::shared_ptr<ShownParam>> all;
  for (const auto& [sharded_param, weak] : by_sharded_param_)
    if (auto shown = weak.lock()) all.emplace(shown->sharded().tensor().unsafeGetTensorImpl(), std::move(shown));
  return all;
}

std::shared_ptr<ShownParam> ShownRegistry::shown_as(const at::Tensor& dtensor, const ShownParam& besides) const {
  for (const auto& [sharded_param, weak] : by_sharded_param_)
    if (auto shown = weak.lock(); shown && shown.get() != &besides && shown->sharded().tensor().is_same(dtensor)) return shown;
  return nullptr;
}

bool ShownRegistry::shows_at(const at::Tensor& tensor, const Place& place) const {
  const auto found = by_place_.find(place);
  return found != by_place_.end() && found->second->forms().has(tensor);
}

}  // namespace fsdp::python
