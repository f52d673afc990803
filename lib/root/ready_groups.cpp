#include "root/ready_groups.hpp"

#include <algorithm>

#include "root/group_port.hpp"

namespace fsdp {

void ReadyGroups::set(std::span<ParamGroup* const> used, int64_t task) {
  clear();
  for (const auto* group : used) {
    GroupPort::of(*group).mark_ready(task);
    ready_.push_back(group);
  }
}

void ReadyGroups::clear() {
  for (const auto* group : ready_) GroupPort::of(*group).mark_not_ready();
  ready_.clear();
}

void ReadyGroups::drop(const ParamGroup& group) {
  auto* found = std::find(ready_.begin(), ready_.end(), &group);
  if (found == ready_.end()) return;
  GroupPort::of(group).mark_not_ready();
  ready_.erase(found);
}

}  // namespace fsdp
