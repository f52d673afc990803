#include "param/left_storage.hpp"

#include <utility>

namespace fsdp {

void LeftStorages::note(const at::Tensor& unsharded_param, size_t index) {
  if (unsharded_param.is_meta() || !unsharded_param.has_storage() || unsharded_param.storage().nbytes() <= unsharded_param.nbytes()) return;
  const auto& storage = unsharded_param.storage();
  for (auto& known : left_)
    if (known.storage._unsafe_get_target() == storage.unsafeGetStorageImpl()) return known.params.push_back(index);
  left_.push_back({storage.getWeakStorageImpl(), static_cast<int64_t>(storage.nbytes()), {index}});
}

std::vector<LeftStorages::Left> LeftStorages::take_used() {
  auto used = std::exchange(left_, {});
  std::erase_if(used, [](const Left& left) { return left.storage.expired(); });
  return used;
}

}  // namespace fsdp
