#pragma once

#include <memory>
#include <vector>

#include "fsdp/fully_shard.hpp"
#include "module/module_state.hpp"

// What a control of a module acts on.
namespace fsdp {

/// The module's own groups, and those of the modules below it unless `recurse` says no, in depth-first order.
std::vector<std::shared_ptr<ParamGroup>> controlled_groups(ModuleState& state, Recurse recurse);

/// Throws StateError, beginning with the control's name, unless the module is a root.
RootContext& root_context(ModuleState& state, const char* control);

}  // namespace fsdp
