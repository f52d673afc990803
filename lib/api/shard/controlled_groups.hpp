#pragma once

#include <memory>
#include <vector>

#include "fsdp/fsdp_module.hpp"
#include "module/state/module_state.hpp"

// What a control of a module acts on.
namespace fsdp {

/// The module's own groups, and those of the modules below it unless `recurse` says no, in depth-first order.
std::vector<std::shared_ptr<ParamGroup>> controlled_groups(ModuleState& state, Recurse recurse);

/// Throws StateError, beginning with the control's name, unless the module is a root.
RootContext& root_context(ModuleState& state, const char* control);

// FSDPModule's controls of these names act on the whole tree; FSDP2's, which Python shows, on the module's own
// groups unless they are told to go down.
void set_gradient_divide_factor(ModuleState& state, double factor, Recurse recurse);
void set_force_sum_reduction_for_comms(ModuleState& state, bool value, Recurse recurse);
void set_reduce_scatter_unused_params(ModuleState& state, bool value, Recurse recurse);

}  // namespace fsdp
