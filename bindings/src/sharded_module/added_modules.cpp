#include "sharded_module/added_modules.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_set>

#include "base/log.hpp"
#include "dispatch/residency.hpp"
#include "fsdp/error.hpp"
#include "shown/dtensors.hpp"
#include "shown/shown_registry.hpp"
#include "whole/known_mirrors.hpp"

namespace fsdp::python {

namespace {

/// Of the mirror, or one below, a parameter has been sharded.
bool has_sharded(const Mirror& mirror) {
  const auto has = [](const Mirror& each) {
    return std::ranges::any_of(each.entries(), [](const auto& entry) { return shown_registry().has(entry.first); });
  };
  return has(mirror) || std::ranges::any_of(mirror.modules(/*include_self=*/false), [&](const auto& below) {
           return has(static_cast<const Mirror&>(*below));
         });
}

class ModuleLook {
 public:
  void at(const Mirror& mirror, const std::string& path) {
    const auto module = mirror.module();
    if (module.is_none() || !seen_.insert(module.ptr()).second) return;
    const RecursionLevel level(" while looking for added modules");
    at_parameters(mirror, path);
    for (const auto& [key, child] : module.attr("_modules").cast<py::dict>()) {
      if (child.is_none()) continue;
      const auto name = name_of(key);
      if (const auto known = known_mirror(child)) {
        at(*known, joined(path, name));
        continue;
      }
      const auto* before = mirror.child(name);
      at_added(py::reinterpret_borrow<py::object>(child), joined(path, name), before != nullptr && has_sharded(*before));
    }
  }

 private:
  static std::string joined(const std::string& path, const std::string& name) {
    return path.empty() ? name : path + "." + name;
  }

  void at_parameters(const Mirror& mirror, const std::string& path) const {
    for (const auto& [place, value] : mirror.entries())
      if (!mirror.had_parameter(place.name)) judge(value, joined(path, place.name), /*is_replacement=*/false);
  }

  void at_added(const py::object& module, const std::string& path, bool is_replacement) {
    if (!seen_.insert(module.ptr()).second || py::hasattr(module, "_get_fsdp_state")) return;
    const RecursionLevel level(" while looking for added modules");
    for (const auto& [key, value] : module.attr("_parameters").cast<py::dict>())
      judge(py::reinterpret_borrow<py::object>(value), joined(path, name_of(key)), is_replacement);
    for (const auto& [key, child] : module.attr("_modules").cast<py::dict>()) {
      if (child.is_none()) continue;
      if (const auto known = known_mirror(child))
        at(*known, joined(path, name_of(key)));
      else
        at_added(py::reinterpret_borrow<py::object>(child), joined(path, name_of(key)), is_replacement);
    }
  }

  static void judge(const py::object& value, const std::string& name, bool is_replacement) {
    if (!is_parameter(value.ptr())) return;
    const auto& tensor = THPVariable_Unpack(value.ptr());
    const bool is_ours = has_residency_key(tensor.unsafeGetTensorImpl()) || shown_registry().is_shown(tensor);
    if (is_ours || !tensor.requires_grad()) return;
    const auto text = fmt::format(
        "parameter '{}' has been {} after fully_shard, and nobody has sharded it: its gradient is this rank's alone, and the "
        "ranks part. Change the model before fully_shard, or call fully_shard or replicate on the new module, or freeze it",
        name, is_replacement ? "put in the place of a sharded module's" : "added to a sharded model");
    if (is_replacement) throw StateError(text);
    warn_once(text);
  }

  std::unordered_set<PyObject*> seen_;
};

}  // namespace

void check_added_modules(const Mirror& root) {
  if (root.has_changed()) ModuleLook().at(root, "");
}

}  // namespace fsdp::python
