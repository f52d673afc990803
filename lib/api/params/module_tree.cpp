#include "api/params/module_tree.hpp"

#include <unordered_set>

#include "api/params/find_param.hpp"
#include "base/require.hpp"
#include "module/module_access.hpp"
#include "module/module_path.hpp"
#include "module/state/module_table.hpp"

namespace fsdp {

namespace {

using torch::nn::Module;

void collect_modules(Module& module, const std::string& path, ModuleTree& tree,
                     std::unordered_set<const Module*>& seen) {
  if (!seen.insert(&module).second) return;
  const auto position = tree.modules.size();
  tree.modules.push_back({&module, path});
  if (auto state = find_state(module))
    if (std::find(tree.states.begin(), tree.states.end(), state) == tree.states.end())
      tree.states.push_back(std::move(state));
  for (const auto& child : module.named_children())
    if (child.value()) collect_modules(*child.value(), join_path(path, child.key()), tree, seen);
  tree.innermost_first.push_back(position);
}

/// Which entries of the modules' tables are sharded: by the groups' own records, since a tensor
/// that LibTorch's to() has replaced no longer shows it.
void collect_sharded(
    ModuleTree& tree, const std::unordered_set<const Module*>& modules,
    std::vector<std::pair<const Registration*, std::shared_ptr<ParamGroup>>>& places,
    const char* caller) {
  for (const auto& state : tree.states) {
    for (const auto& owned : state->groups()) {
      const auto group = owned.group.lock();
      if (!group) continue;
      for (const auto& place : owned.registrations) {
        if (is_gone(place)) continue;
        require(
            modules.contains(place.module),
            "{}: parameter '{}' is sharded in one group with '{}', but is not in the module given; pass a module that "
            "contains the whole group",
            caller, group->params()[place.param].name(), state->tree().description());
        places.emplace_back(&place, group);
      }
      tree.groups.push_back(group);
    }
  }
}

void refuse_foreign(const at::Tensor& parameter, const ModuleTree& tree, const char* caller) {
  const auto found = find_param(parameter);
  if (!found ||
      std::find(tree.groups.begin(), tree.groups.end(), found->group) != tree.groups.end())
    return;
  throw UsageError(
      fmt::format("{}: parameter '{}' is in the group of '{}', which is not in the module given; pass the module that "
                  "fully_shard was called on, or one that contains it",
                  caller, found->param().name(), found->group->name()));
}

}  // namespace

ModuleTree walk_tree(Module& module, const char* caller) {
  ModuleTree tree;
  std::unordered_set<const Module*> modules;
  collect_modules(module, "", tree, modules);
  std::vector<std::pair<const Registration*, std::shared_ptr<ParamGroup>>> places;
  collect_sharded(tree, modules, places, caller);

  std::unordered_set<const c10::TensorImpl*> seen;
  for (size_t owner = 0; owner < tree.modules.size(); ++owner) {
    auto& [node, path] = tree.modules[owner];
    auto& table = ModuleAccess::parameters(*node);
    for (size_t slot = 0; slot < table.size(); ++slot) {
      const auto& tensor = table[slot].value();
      if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
      TreeEntry entry{tensor, join_path(path, table[slot].key()), owner, nullptr};
      const auto place = std::find_if(places.begin(), places.end(), [&](const auto& known) {
        return known.first->module == node && known.first->slot == slot;
      });
      if (place != places.end()) {
        entry.group = place->second;
        entry.index = place->first->param;
      } else {
        refuse_foreign(tensor, tree, caller);
      }
      tree.parameters.push_back(std::move(entry));
    }
    for (const auto& buffer : node->named_buffers(/*recurse=*/false))
      if (buffer.value().defined() && seen.insert(buffer.value().unsafeGetTensorImpl()).second)
        tree.buffers.push_back({buffer.value(), join_path(path, buffer.key()), owner, nullptr});
  }
  return tree;
}

}  // namespace fsdp
