#include "root/sanitizer_faults.hpp"

#include "base/require.hpp"
#include "group/group_sanitizer.hpp"
#include "root/root_context.hpp"

namespace fsdp {

void throw_faults(RootContext& root) {
  std::lock_guard lock(root.mutex());
  if (in_step(root.step().state())) return;
  std::vector<std::string> faults;
  for (auto* group : root.runner().groups()) {
    if (group->parts().sanitizer == nullptr) continue;
    for (auto& fault : group->parts().sanitizer->take_faults()) faults.push_back(std::move(fault));
  }
  require_state(faults.empty(), "the sanitizer found {} fault(s) on this rank:\n  {}", faults.size(),
                fmt::join(faults, "\n  "));
}

}  // namespace fsdp
