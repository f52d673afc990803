#pragma once

namespace fsdp {

class ParamGroup;

// Whether a group's collectives are in registered memory (Note [Memory that NCCL knows]).

/// From the next gather and reduction on, in slots (gather_slots.hpp, reduction_slots.hpp); while the group is released and
/// not reduced.
void set_symmetric_memory(ParamGroup& group, bool value);
/// What travels as it lies in the shard does; what is packed for a custom collective or an extension does not.
bool gathers_in_slots(const ParamGroup& group);
/// What is packed for a reduction is, but for a custom collective.
bool reduces_in_slots(const ParamGroup& group);

}  // namespace fsdp
