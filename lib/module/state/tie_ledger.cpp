#include "module/state/tie_ledger.hpp"

#include "base/require.hpp"
#include "root/find_param.hpp"

namespace fsdp {

at::Tensor SharedEntry::unsharded_param() const {
  if (is_gone(place)) return {};
  const auto* tensor = tensor_at(place);
  return tensor != nullptr ? *tensor : at::Tensor();
}

void TieLedger::forget_settled() {
  // Not settled are those whose table still holds an unsharded parameter.
  std::erase_if(entries_, [](const SharedEntry& entry) {
    const auto found = find_param(entry.unsharded_param());
    return !found || !found->is_unsharded_param;
  });
}

void TieLedger::check(const std::string& state) const {
  for (const auto& entry : entries_) {
    const auto found = find_param(entry.unsharded_param());
    require_state(!found,
                  "{}: '{}' of {} is the same parameter, but no sharded module contains both; call "
                  "fully_shard on a module around them, or on the list of them",
                  found ? found->param().name() : "", entry.name, state);
  }
}

}  // namespace fsdp
