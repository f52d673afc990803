#include "api/shard/controlled_groups.hpp"

#include "base/require.hpp"

namespace fsdp {

std::vector<std::shared_ptr<ParamGroup>> controlled_groups(ModuleState& state, Recurse recurse) {
  if (recurse == Recurse::kNo) return state.live_groups();
  std::vector<std::shared_ptr<ParamGroup>> groups;
  state.visit([&](ModuleState& owner) {
    for (auto& group : owner.live_groups()) groups.push_back(std::move(group));
  });
  return groups;
}

RootContext& root_context(ModuleState& state, const char* control) {
  require_state(state.tree().is_root(), "{}: '{}' is not a root; call it on the root module", control,
                state.tree().description());
  return *state.context();
}

}  // namespace fsdp
