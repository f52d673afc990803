#pragma once

#include <memory>
#include <vector>

namespace fsdp {

class ModuleState;

/// The roots whose scopes (ForwardScope) are open on this thread, outermost first.
std::vector<std::weak_ptr<ModuleState>> open_scopes();

}  // namespace fsdp
