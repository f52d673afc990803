#pragma once

#include "fsdp/checkpoint_parts.hpp"

namespace fsdp {

/// The state of the default generators, the CPU's and the current accelerator's: one tensor of each rank, which it alone
/// holds. The tensors are copies.
CheckpointSection rng_section(int rank, int world_size);
/// Whether the checkpoint has the state of such generators, from as many ranks. Warns where they are of another kind.
bool can_restore_rng(const CheckpointReader& reader, const CheckpointSection& section, int world_size);
/// Gives the generators the states that a section of this rank holds.
void restore_rng(const CheckpointSection& section, int rank);

}  // namespace fsdp
