#include "module/state/tree_watch.hpp"

#include <torch/nn/cloneable.h>

#include <algorithm>

#include "module/module_access.hpp"
#include "module/module_walk.hpp"

namespace fsdp {

/// Names a class of LibTorch's that may look at a module's children without a copy of their names.
struct LooksAtChildren {};

}  // namespace fsdp

template <>
class torch::nn::Cloneable<fsdp::LooksAtChildren> {
 public:
  static const auto& children(const torch::nn::Module& module) { return module.children_; }
};

namespace fsdp {

namespace {

const auto& children_of(const torch::nn::Module& module) { return torch::nn::Cloneable<LooksAtChildren>::children(module); }

}  // namespace

void TreeWatch::look(std::span<const WalkedModule> modules) {
  known_.clear();
  children_.clear();
  for (const auto& walked : modules) {
    auto& module = *walked.module;
    for (const auto& child : children_of(module)) children_.push_back({child.value().get(), child.value()});
    auto alive = module.weak_from_this();
    const bool is_shared = !alive.expired();
    known_.push_back({.module = &module,
                      .alive = std::move(alive),
                      .is_shared = is_shared,
                      .is_unit = walked.path.empty(),
                      .parameters = ModuleAccess::parameters(module).size(),
                      .children_end = children_.size()});
  }
}

bool TreeWatch::has_changed() const {
  auto child = children_.begin();
  for (const auto& known : known_) {
    if (known.is_gone() || ModuleAccess::parameters(std::as_const(*known.module)).size() != known.parameters) return true;
    const auto end = children_.begin() + static_cast<std::ptrdiff_t>(known.children_end);
    const auto& children = children_of(*known.module);
    if (children.size() != static_cast<size_t>(end - child)) return true;
    for (const auto& item : children)
      if (item.value().get() != child++->module) return true;
  }
  return false;
}

bool TreeWatch::knows(const torch::nn::Module& module) const {
  return std::ranges::any_of(known_, [&](const Known& known) { return known.module == &module && !known.is_gone(); });
}

std::vector<torch::nn::Module*> TreeWatch::units() const {
  std::vector<torch::nn::Module*> units;
  for (const auto& known : known_) {
    if (!known.is_unit) continue;
    if (known.is_gone()) return {};
    units.push_back(known.module);
  }
  return units;
}

}  // namespace fsdp
