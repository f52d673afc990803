#include "root/edit/late_extension.hpp"

#include "base/require.hpp"
#include "group/param_group.hpp"
#include "root/edit/edit_group.hpp"
#include "root/group_port.hpp"

namespace fsdp {

void set_extension(ParamGroup& group, size_t index, std::shared_ptr<PreparedExtension> extension) {
  const auto root = GroupPort::of(group).root();
  std::lock_guard lock(root->mutex());
  require_state(root->is_quiescent(), "{}: cannot be gathered in another form in the middle of a step",
                group.params()[index].name());
  edit(group, {.encoding = GroupChange::Encoding{index, std::move(extension)}});
}

}  // namespace fsdp
