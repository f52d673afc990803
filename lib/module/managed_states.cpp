#include "module/managed_states.hpp"

#include <unordered_map>

#include "base/plain_values.hpp"
#include "base/require.hpp"
#include "dispatch/param_storage.hpp"
#include "dispatch/residency.hpp"
#include "module/module_access.hpp"
#include "module/module_path.hpp"
#include "param/left_storage.hpp"
#include "root/autograd/gradient_hook.hpp"
#include "root/find_param.hpp"

namespace fsdp {

namespace {

void check_param(const at::Tensor& param, const std::string& name, c10::Device device) {
  if (const auto* said = said_of_left_memory(param)) throw UsageError(fmt::format("{}: {}", name, *said));
  require(!has_residency_key(param.unsafeGetTensorImpl()) && !has_gradient_hook(param),
          "{}: this parameter belongs to the group of a module around this one already; shard inner modules "
          "before outer ones, or name it in ignored_params",
          name);
  require(is_plain(param), "{}: expected a plain dense parameter, found {}; register its values instead, or name it in "
          "ignored_params", name, what_it_is(param));
  const bool movable = param.device() == device || param.is_cpu() || param.is_meta();
  require(movable, "{}: is on {}, but the mesh is on {}; move the module or make the mesh there",
          name, param.device().str(), device.str());
}

}  // namespace

ManagedStates collect_states(const ModuleWalk& walk, c10::Device device) {
  ManagedStates states;
  std::unordered_map<const c10::TensorImpl*, size_t> known;
  std::unordered_set<const c10::TensorImpl*> known_buffers;
  for (const auto& walked : walk.managed) {
    auto& table = ModuleAccess::parameters(*walked.module);
    for (size_t slot = 0; slot < table.size(); ++slot) {
      const auto& param = table[slot].value();
      // Linear(bias=false) registers an undefined tensor.
      if (!param.defined() || walk.ignored.contains(param.unsafeGetTensorImpl())) continue;
      const auto name = join_path(walked.path, table[slot].key());
      auto place = registration_at(*walked.module, slot);
      if (const auto found = find_param(param); found && found->is_unsharded_param) {
        states.shared.push_back({std::move(place), name, walked.unit, found->group});
        continue;
      }
      const auto [found, is_new] = known.emplace(param.unsafeGetTensorImpl(), states.params.size());
      if (is_new) {
        check_param(param, name, device);
        states.params.push_back({param, name, walked.unit, {}, walked.is_exempt});
      }
      states.params[found->second].registrations.push_back(std::move(place));
    }
    for (const auto& buffer : walked.module->named_buffers(/*recurse=*/false))
      if (buffer.value().defined() && known_buffers.insert(buffer.value().unsafeGetTensorImpl()).second)
        states.buffers.push_back({buffer.value(), join_path(walked.path, buffer.key()), walked.is_exempt});
  }
  return states;
}

}  // namespace fsdp
