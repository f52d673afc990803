#pragma once

#include "group/edit/group_edit.hpp"

// The one way to change where a group's rows lie, in what, and in which form they are gathered (group/edit/group_edit.hpp).
namespace fsdp {

/// Takes the root's lock and releases the group, which its modules show as sharded then. Throws what GroupEdit::prepare throws;
/// nothing has changed then.
void edit(ParamGroup& group, GroupChange change);
/// The first half of that, which changes nothing.
GroupEdit prepare_edit(ParamGroup& group, GroupChange change);
/// The second half: does not fail.
void edit(ParamGroup& group, GroupEdit prepared);

}  // namespace fsdp
