#pragma once

#include <memory>
#include <vector>

#include "module/managed_states.hpp"
#include "module/module_walk.hpp"

// One parameter that modules of several groups register. Whoever is sharded first holds it; the others
// note that their tables hold its unsharded parameter. The first module around them all that is sharded takes it over.
namespace fsdp {

/// Moves what modules in the trees of `units`, or sharded modules below them, share among themselves from
/// `states.shared` to `states.params`, with every place that registers it in depth-first order. What is shared with
/// modules outside stays. Changes nothing else.
void claim_ties(ManagedStates& states, const std::vector<torch::nn::Module*>& units, const ModuleWalk& walk);

/// After the new state's groups are attached: the states below forget what is no longer theirs, and owners
/// outside learn with whom they share.
void settle_ties(const std::shared_ptr<ModuleState>& state);

}  // namespace fsdp
