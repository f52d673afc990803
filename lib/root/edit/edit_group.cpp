#include "root/edit/edit_group.hpp"

#include <mutex>
#include <utility>

#include "root/group_port.hpp"

namespace fsdp {

GroupEdit prepare_edit(ParamGroup& group, GroupChange change) {
  const std::lock_guard lock(root_of(group).mutex());
  group.changes().take_over_requires_grad();  // making sharded parameters anew would undo what nobody has seen yet
  return GroupEdit::prepare(group, std::move(change));
}

void edit(ParamGroup& group, GroupChange change) {
  const std::lock_guard lock(root_of(group).mutex());
  edit(group, prepare_edit(group, std::move(change)));
}

void edit(ParamGroup& group, GroupEdit prepared) {
  const auto root = GroupPort::of(group).root();
  const std::lock_guard lock(root->mutex());
  const bool changes_rows = !prepared.is_empty();
  root->runner().ready().drop(group);
  if (changes_rows) root->control(group, GroupEvent::kUserReshards);
  std::move(prepared).commit(group);
  if (changes_rows) root->runner().facts_changed(group);
}

}  // namespace fsdp
