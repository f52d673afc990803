#include "whole/known_mirrors.hpp"

#include <unordered_set>

#include "fully_shard.hpp"
#include "module/module_access.hpp"
#include "root/find_param.hpp"
#include "shown/shown_registry.hpp"

namespace fsdp::python {

namespace {

class Collector {
 public:
  void visit(const py::handle& module, bool recurses) {
    const RecursionLevel level(" while looking for sharded modules");
    if (!seen_.insert(module.ptr()).second) return;
    if (auto mirror = known_mirror(module)) take(std::move(mirror));
    if (!recurses) return;
    for (const auto& [name, child] : py::object(module.attr("_modules")).cast<py::dict>())
      if (!child.is_none()) visit(child, recurses);
  }
  std::vector<std::shared_ptr<Mirror>> found;

 private:
  void take(std::shared_ptr<Mirror> mirror) {
    if (held_.contains(mirror.get())) return;
    for (const auto& below : mirror->modules()) held_.insert(below.get());
    found.push_back(std::move(mirror));
  }

  std::unordered_set<PyObject*> seen_;
  std::unordered_set<const torch::nn::Module*> held_;
};

std::shared_ptr<ShownParam> shown_at(torch::nn::Module& module, size_t slot) {
  const auto tensor = tensor_at(module, slot);
  const auto found = tensor.defined() ? find_param(tensor) : std::nullopt;
  return found ? shown_registry().find(found->param().local_tensor()) : nullptr;
}

}  // namespace

std::shared_ptr<Mirror> known_mirror(const py::handle& module) {
  const py::object known = python_side().mirrors.attr("get")(module);
  return known.is_none() ? nullptr : known.cast<std::shared_ptr<Mirror>>();
}

at::Tensor tensor_at(torch::nn::Module& mirror, size_t slot) {
  return ModuleAccess::parameters(mirror)[slot].value();
}

std::vector<std::shared_ptr<Mirror>> known_mirrors(const py::handle& module, bool recurses) {
  Collector collector;
  collector.visit(module, recurses);
  return std::move(collector.found);
}

std::vector<std::shared_ptr<ShownParam>> params_below(const std::vector<std::shared_ptr<Mirror>>& mirrors) {
  std::vector<std::shared_ptr<ShownParam>> params;
  std::unordered_set<const ShownParam*> seen;
  for (const auto& mirror : mirrors)
    for (const auto& module : mirror->modules())
      for (size_t slot = 0; slot < ModuleAccess::parameters(*module).size(); ++slot)
        if (auto shown = shown_at(*module, slot); shown && seen.insert(shown.get()).second) params.push_back(std::move(shown));
  return params;
}

}  // namespace fsdp::python
