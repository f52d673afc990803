#pragma once

#include <span>
#include <vector>

#include "schedule/group_facts.hpp"
#include "trace/collective_trace.hpp"

namespace fsdp {

class ParamGroup;

// What plans and records are told of groups.

/// ranks: as in ReduceFacts.
GroupFacts facts_of(const ParamGroup& group, int ranks);

/// Takes the first values from the groups that have noted any (GroupNotes::note_first_values); they have none from then on.
std::vector<FirstValuesOfGroup> take_first_values(std::span<ParamGroup* const> groups);

}  // namespace fsdp
