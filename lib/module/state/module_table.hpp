#pragma once

#include <torch/nn/module.h>

#include <memory>

#include "module/state/module_state.hpp"

namespace fsdp {

/// The process's weak table from module to state. An entry ends with its module: a module at the
/// same address later is another one. Thread-safe.
///
/// Modules that no shared_ptr owns (on the stack) are known by their group's life instead.
std::shared_ptr<ModuleState> find_state(const torch::nn::Module& module);
void remember_state(torch::nn::Module& module, std::shared_ptr<ModuleState> state);

/// How many entries have been looked at, since the process began, to find those whose modules are gone. For tests: it
/// grows with the number of modules, not with its square.
uint64_t looks_at_known_modules();

}  // namespace fsdp
