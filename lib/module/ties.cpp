#include "module/ties.hpp"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "base/require.hpp"
#include "module/module_access.hpp"
#include "module/module_path.hpp"
#include "root/find_param.hpp"
#include "root/group_port.hpp"

namespace fsdp {

namespace {

using torch::nn::Module;

/// The unsharded parameters of entries in the tree whose owners are in it too, each once.
std::vector<FoundParam> shared_inside(const ManagedStates& states, const ModuleWalk& walk) {
  std::vector<FoundParam> inside;
  std::unordered_set<const c10::TensorImpl*> known;
  auto consider = [&](const SharedEntry& entry) {
    const auto unsharded_param = entry.unsharded_param();
    auto found = find_param(unsharded_param);
    if (!found || walk.ignored.contains(unsharded_param.unsafeGetTensorImpl())) return;
    const auto owner = ModuleState::of(*found->group);
    const bool is_below = owner && std::any_of(walk.nested.begin(), walk.nested.end(), [&](const auto& nested) {
                            return nested.state->root() == owner->root();
                          });
    if (is_below && known.insert(unsharded_param.unsafeGetTensorImpl()).second) inside.push_back(std::move(*found));
  };
  for (const auto& entry : states.shared) consider(entry);
  for (const auto& nested : walk.nested)
    nested.state->root()->visit([&](ModuleState& state) {
      for (const auto& entry : state.ties().entries()) consider(entry);
    });
  return inside;
}

/// Finds every place that registers one of the parameters, sharded modules included.
class Places {
 public:
  Places(const std::vector<FoundParam>& params, const IsExempt& is_exempt) : is_exempt_(is_exempt), found_(params.size()) {
    for (size_t i = 0; i < params.size(); ++i) {
      by_tensor_[params[i].param().unsharded_param().unsafeGetTensorImpl()] = i;
      by_tensor_[params[i].param().sharded.identity()] = i;
    }
  }

  struct TiedEntry {
    Registration entry;
    std::string name;
    size_t unit;
    bool is_exempt;
  };

  /// is_exempt: the module around it is.
  void visit(Module& module, const std::string& path, size_t unit, bool is_exempt = false) {
    if (!seen_.insert(&module).second) return;
    is_exempt = is_exempt || (is_exempt_ && is_exempt_(module));
    const auto& table = ModuleAccess::parameters(module);
    for (size_t slot = 0; slot < table.size(); ++slot) {
      const auto param = param_at(module, slot);
      if (!param) continue;
      found_[*param].push_back({registration_at(module, slot), join_path(path, table[slot].key()), unit, is_exempt});
    }
    for (const auto& child : module.named_children())
      if (child.value()) visit(*child.value(), join_path(path, child.key()), unit, is_exempt);
  }

  const std::vector<TiedEntry>& of(size_t param) const { return found_[param]; }

 private:
  std::optional<size_t> param_at(const Module& module, size_t slot) const {
    const auto& tensor = ModuleAccess::parameters(module)[slot].value();
    const auto known = tensor.defined() ? by_tensor_.find(tensor.unsafeGetTensorImpl()) : by_tensor_.end();
    return known != by_tensor_.end() ? std::optional(known->second) : std::nullopt;
  }

  const IsExempt& is_exempt_;
  std::vector<std::vector<TiedEntry>> found_;
  std::unordered_map<const c10::TensorImpl*, size_t> by_tensor_;
  std::unordered_set<const Module*> seen_;
};

}  // namespace

void claim_ties(ManagedStates& states, const std::vector<Module*>& units, const ModuleWalk& walk) {
  const auto claimed = shared_inside(states, walk);
  if (claimed.empty()) return;
  Places places(claimed, walk.is_exempt);
  for (size_t unit = 0; unit < units.size(); ++unit) places.visit(*units[unit], "", unit);
  for (size_t i = 0; i < claimed.size(); ++i) {
    const auto& found = claimed[i];
    if (places.of(i).empty()) continue;  // registered beside these modules alone
    const auto unsharded_param = found.param().unsharded_param();
    require_state(found.group->parts().local_shards == nullptr,
                  "fully_shard: {} is shared with another sharded module, but '{}', which held it, has handed out "
                  "its local shards (fsdp::local_shards); call that after the last fully_shard",
                  found.param().name(), found.group->name());
    const auto& first = places.of(i).front();
    ManagedParam param{unsharded_param, first.name, first.unit, {}, first.is_exempt, TiedSource{found.group, found.index}};
    for (const auto& place : places.of(i)) param.registrations.push_back(place.entry);
    states.params.push_back(std::move(param));
    std::erase_if(states.shared, [&](const SharedEntry& entry) { return entry.unsharded_param().is_same(unsharded_param); });
  }
}

void settle_ties(const std::shared_ptr<ModuleState>& state) {
  state->visit([&](ModuleState& below) {
    if (&below != state.get()) below.forget_settled_ties();
  });
  for (const auto& entry : state->ties().entries())
    if (const auto owner = entry.owner.lock())
      if (const auto other = ModuleState::of(*owner)) other->ties().add_sharer(state);
}

}  // namespace fsdp
