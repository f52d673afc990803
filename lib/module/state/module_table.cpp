#include "module/state/module_table.hpp"

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "root/group_port.hpp"

namespace fsdp {

namespace {

/// A group of this state, or of one below it, is alive.
bool has_group_below(ModuleState& state) {
  bool found = false;
  // Asked by whichever thread looks through the table: a group that is another rank's is not to be held, or it may go there.
  state.visit([&](ModuleState& below) {
    found |= std::any_of(below.groups().begin(), below.groups().end(),
                         [](const auto& owned) { return !owned.group.expired(); });
  });
  return found;
}

struct KnownModule {
  std::weak_ptr<const torch::nn::Module> module;
  bool is_shared;
  std::weak_ptr<ModuleState> state;
  std::shared_ptr<ModuleState> without_group;  // else the group owns it, and the module the group

  /// A module that no shared_ptr owns tells nobody when it goes; its groups do, with its unsharded parameters.
  bool is_alive() const {
    if (is_shared) return !module.expired();
    return without_group ? has_group_below(*without_group) : !state.expired();
  }
};

/// When a table that grows is to be swept of what is dead: at any size while it is small, then each time it has doubled.
/// So what is dead is never more than the rest, and to remember n modules takes time in proportion to n.
class Sweeps {
 public:
  bool is_due(size_t size) const { return size >= next_; }
  void note(size_t left) { next_ = std::max(kSmall, 2 * left); }

 private:
  static constexpr size_t kSmall = 8;
  size_t next_ = 0;
};

struct Table {
  std::mutex mutex;
  std::unordered_map<const torch::nn::Module*, KnownModule> entries;
  Sweeps sweeps;
  uint64_t looks = 0;
};

// Never destroyed: modules in static storage may outlive any order of destruction.
Table& table() {
  static auto* instance = new Table;
  return *instance;
}

/// Returns what the caller is to let go of without the lock.
std::vector<std::shared_ptr<ModuleState>> sweep_entries(decltype(Table::entries)& entries) {
  std::vector<std::shared_ptr<ModuleState>> dead;
  table().looks += entries.size();
  for (auto entry = entries.begin(); entry != entries.end();) {
    if (entry->second.is_alive()) {
      ++entry;
      continue;
    }
    dead.push_back(std::move(entry->second.without_group));
    entry = entries.erase(entry);
  }
  table().sweeps.note(entries.size());
  return dead;
}

/// The state has lost its last group, as all its parameters were replaced, but not its modules, which a shared_ptr owns: until
/// it gets another group, the table owns it.
void keep_without_group(const std::shared_ptr<ModuleState>& state) {
  if (!state->live_groups().empty()) return;
  std::lock_guard lock(table().mutex);
  for (const auto& unit : state->tree().units()) {
    const auto found = table().entries.find(unit.module);
    if (found == table().entries.end() || !found->second.is_shared || found->second.module.expired()) continue;
    if (found->second.state.lock() == state) found->second.without_group = state;
  }
}

/// A group keeps its state alive by this.
std::shared_ptr<ModuleState> kept_by_group(const std::shared_ptr<ModuleState>& state) {
  return {state.get(), [kept = state](ModuleState*) mutable {
            keep_without_group(kept);
            kept.reset();
          }};
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
  std::vector<std::shared_ptr<ModuleState>> dead;  // destroyed outside the lock
  std::lock_guard lock(table().mutex);
  auto& entries = table().entries;
  if (table().sweeps.is_due(entries.size())) dead = sweep_entries(entries);
  std::weak_ptr<const torch::nn::Module> weak = module.weak_from_this();
  const bool is_shared = !weak.expired();
  const auto groups = state->live_groups();
  for (const auto& group : groups)
    if (auto& port = GroupPort::of(*group); port.holder() != state) port.set_holder(kept_by_group(state));
  entries[&module] = {std::move(weak), is_shared, state, groups.empty() ? state : nullptr};
}

uint64_t looks_at_known_modules() {
  std::lock_guard lock(table().mutex);
  return table().looks;
}

}  // namespace fsdp
