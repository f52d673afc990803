#include "trace/desync/verdict/desync_verdict.hpp"

#include <algorithm>

namespace fsdp {

void DesyncVerdict::add(Communicator& group) {
  for (const auto& known : groups_)
    if (known.identity == &group && !known.alive.expired()) return;
  std::lock_guard lock(mutex_);
  std::erase_if(groups_, [](const Group& known) { return known.alive.expired(); });
  groups_.push_back({&group, group.weak_from_this()});
}

bool DesyncVerdict::uses(const GroupPlace& group) const {
  std::lock_guard lock(mutex_);
  return std::any_of(groups_.begin(), groups_.end(), [&](const Group& known) {
    const auto alive = known.alive.lock();
    return alive && place_of(*alive).get() == &group;
  });
}

void DesyncVerdict::give(const Verdict& verdict) {
  std::vector<std::shared_ptr<Communicator>> groups;
  {
    std::lock_guard lock(mutex_);
    if (!failure_.is_set()) given_ = verdict;
    failure_.set(verdict.text);
    for (const auto& known : groups_) groups.push_back(known.alive.lock());
  }
  for (const auto& group : groups)
    if (group) group->abort(verdict.text);
}

}  // namespace fsdp
