#pragma once

#include "group/param_group.hpp"

// The two groups of a parameter that goes from one to the other (tied_params.hpp), each of its own root.
namespace fsdp {

/// The sharded parameter is this group's from now on. link: to this group.
void take_tied(ParamGroup& group, const TiedParam& tied);

/// Memory of what has been taken from a group is given back, where that takes no communication.
void compact(ParamGroup& group);

}  // namespace fsdp
