#pragma once

#include <span>

#include "group/group_parts.hpp"

// Parameters that are tied across groups go to the group of the module around all their owners. The tensor in the
// parameter table stays the same one; the group that gives it up keeps an empty place.
namespace fsdp {

/// A parameter that another group holds, until the one that takes it is attached.
struct TiedParam {
  size_t index;  ///< where it is going to
  TiedSource from;
  at::Tensor gradient = {};  ///< this rank's rows, where they had to be cut anew
  at::Tensor kept = {};      ///< its memory of before fully_shard, where it has gone on in that
};

/// The other group's memory of it, where that is the parameter's own (one rank) and can stay; else undefined.
at::Tensor piece_of(const GroupParts& parts, const TiedParam& tied);

/// The rows that every rank holds there and will hold here, where both groups cut alike.
void copy_tied_rows(GroupParts& parts, std::span<const TiedParam> tied);

/// The values and gradients of those that the other group cuts in another way: a collective call where there are such.
/// Changes nothing of the other group.
void gather_tied(GroupParts& parts, std::span<TiedParam> tied);

}  // namespace fsdp
