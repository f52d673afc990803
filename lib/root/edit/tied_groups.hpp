#pragma once

#include "group/param_group.hpp"

namespace fsdp {

/// A parameter that another group has given up is this group's from now on, and so is what shows its memory of before. Each
/// group is of its own root.
void take_tied(ParamGroup& group, const TiedParam& tied);

}  // namespace fsdp
