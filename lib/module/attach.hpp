#pragma once

#include <memory>
#include <vector>

#include "module/module_state.hpp"

namespace fsdp {

/// What fully_shard does: checks, then copies this rank's rows, then changes the modules. Whatever
/// throws, throws before the first change.
std::shared_ptr<ModuleState> attach(const std::vector<torch::nn::Module*>& modules,
                                    const FullyShardOptions& options);

}  // namespace fsdp
