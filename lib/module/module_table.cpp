#include "module/module_table.hpp"

#include <mutex>
#include <unordered_map>

namespace fsdp {

namespace {

struct Entry {
  std::weak_ptr<const torch::nn::Module> module;
  bool is_shared;
  std::weak_ptr<ModuleState> state;
  std::shared_ptr<ModuleState> without_group;  // else the group owns it, and the module the group

  /// A module that no shared_ptr owns tells nobody when it goes; its groups do, with its handles.
  bool is_alive() const {
    if (is_shared) return !module.expired();
    return without_group ? without_group->has_group_below() : !state.expired();
  }
};

struct Table {
  std::mutex mutex;
  std::unordered_map<const torch::nn::Module*, Entry> entries;
};

// Never destroyed: modules in static storage may outlive any order of destruction.
Table& table() {
  static auto* instance = new Table;
  return *instance;
}

}  // namespace

std::shared_ptr<ModuleState> find_state(const torch::nn::Module& module) {
  std::shared_ptr<ModuleState> dead;  // destroyed outside the lock
  std::lock_guard lock(table().mutex);
  const auto found = table().entries.find(&module);
  if (found == table().entries.end()) return nullptr;
  if (found->second.is_alive()) return found->second.state.lock();
  dead = std::move(found->second.without_group);
  table().entries.erase(found);
  return nullptr;
}

void remember_state(torch::nn::Module& module, std::shared_ptr<ModuleState> state) {
  std::vector<std::shared_ptr<ModuleState>> dead;
  std::lock_guard lock(table().mutex);
  auto& entries = table().entries;
  for (auto entry = entries.begin(); entry != entries.end();) {
    if (entry->second.is_alive()) {
      ++entry;
      continue;
    }
    dead.push_back(std::move(entry->second.without_group));
    entry = entries.erase(entry);
  }
  std::weak_ptr<const torch::nn::Module> weak = module.weak_from_this();
  const bool is_shared = !weak.expired();
  const auto group = state->group.lock();
  if (group) group->companion = state;
  entries[&module] = {std::move(weak), is_shared, state, group ? nullptr : state};
}

}  // namespace fsdp
