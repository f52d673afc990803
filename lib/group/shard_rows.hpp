#pragma once

#include <ATen/core/Tensor.h>

#include <span>

#include "group/group_parts.hpp"
#include "group/edit/tied_params.hpp"

// This rank's rows of a group, as they are laid out in its shard, and the sharded parameters on top of them.
namespace fsdp {

/// Makes them from the unsharded parameters, which stay as they are, and from the groups that hold those that are tied, without
/// a copy where the memory can stay (one rank).
void make_rows(GroupParts& parts, std::span<const TiedParam> tied);

}  // namespace fsdp
