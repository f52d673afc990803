#pragma once

#include "group/edit/group_edit.hpp"

// The one way to change where a group's rows lie, in what, and in which form they are gathered (group/group_edit.hpp).
namespace fsdp {

/// Takes the root's lock and releases the group, which its modules show as sharded then. Throws what GroupEdit::prepare throws;
/// nothing has changed then.
void edit(ParamGroup& group, GroupChange change);
/// One that has been prepared: does not fail.
void edit(ParamGroup& group, GroupEdit prepared);

}  // namespace fsdp
