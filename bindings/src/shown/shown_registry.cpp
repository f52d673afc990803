#include "shown/shown_registry.hpp"

#include <algorithm>

#include "shown/shown_param.hpp"

namespace fsdp::python {

// Never destroyed: parameters may outlive it.
ShownRegistry& shown_registry() {
  static auto* registry = new ShownRegistry;
  return *registry;
}

void ShownRegistry::add(const std::shared_ptr<ShownParam>& shown) {
  by_local_tensor_[shown->sharded().local_tensor().unsafeGetTensorImpl()] = shown;
}

void ShownRegistry::remove(const ShownParam& shown) {
  by_local_tensor_.erase(shown.sharded().local_tensor().unsafeGetTensorImpl());
  for (const auto& entry : shown.forms().entries().all()) by_place_.erase(entry.place);
}

std::shared_ptr<ShownParam> ShownRegistry::find(const at::Tensor& local_tensor) const {
  const auto found = by_local_tensor_.find(local_tensor.unsafeGetTensorImpl());
  return found == by_local_tensor_.end() ? nullptr : found->second.lock();
}

std::unordered_map<const c10::TensorImpl*, std::shared_ptr<ShownParam>> ShownRegistry::all_by_dtensor() const {
  std::unordered_map<const c10::TensorImpl*, std::shared_ptr<ShownParam>> all;
  for (const auto& [local_tensor, weak] : by_local_tensor_)
    if (auto shown = weak.lock()) all.emplace(shown->sharded().tensor().unsafeGetTensorImpl(), std::move(shown));
  return all;
}

void ShownRegistry::settle_ties() const {
  std::vector<std::shared_ptr<ShownParam>> all;
  std::unordered_map<const c10::TensorImpl*, int> stands_for;
  for (const auto& [local_tensor, weak] : by_local_tensor_)
    if (auto shown = weak.lock()) {
      ++stands_for[shown->sharded().tensor().unsafeGetTensorImpl()];
      all.push_back(std::move(shown));
    }
  for (const auto& shown : all) shown->settle_tie(stands_for.at(shown->sharded().tensor().unsafeGetTensorImpl()) > 1);
}

bool ShownRegistry::is_shown(const at::Tensor& dtensor) const {
  return std::ranges::any_of(by_local_tensor_, [&](const auto& entry) {
    const auto shown = entry.second.lock();
    return shown && shown->sharded().tensor().is_same(dtensor);
  });
}

bool ShownRegistry::shows_at(const at::Tensor& tensor, const PyEntry& place) const {
  const auto found = by_place_.find(place);
  return found != by_place_.end() && found->second->forms().has(tensor);
}

}  // namespace fsdp::python
