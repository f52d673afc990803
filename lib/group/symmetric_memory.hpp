#pragma once

namespace fsdp {

class ParamGroup;

// Whether a group's collectives are in registered memory (Note [Memory that NCCL knows]).

/// The group's option has been changed: from the next gather and reduction on they are in slots (gather_slots.hpp,
/// reduction_slots.hpp), or not; while the group is released and not reduced.
void symmetric_memory_changed(ParamGroup& group);
/// What travels as it lies in the shard does; what is packed for a custom collective or an extension does not.
bool gathers_in_slots(const ParamGroup& group);
/// What is packed for a reduction is, but for a custom collective.
bool reduces_in_slots(const ParamGroup& group);

}  // namespace fsdp
