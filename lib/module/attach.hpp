#pragma once

#include <memory>
#include <vector>

#include "module/state/module_state.hpp"

namespace fsdp {

/// What fully_shard does: checks, then copies this rank's rows, then changes the modules. Whatever
/// throws, throws before the first change.
///
/// like: the state of modules with the same parameters, whose ranks hold what they are to hold here; null:
/// the options say.
std::shared_ptr<ModuleState> attach(const std::vector<torch::nn::Module*>& modules,
                                    const FullyShardOptions& options, const ModuleState* like = nullptr);

/// Takes over what was registered below the state's modules since they were sharded, in a group more of the state; to be called
/// between steps. Whatever throws, throws before the first change.
void attach_late(const std::shared_ptr<ModuleState>& state);

}  // namespace fsdp
