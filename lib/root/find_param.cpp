#include "root/find_param.hpp"

namespace fsdp {

std::optional<FoundParam> find_param(const at::Tensor& tensor) {
  if (!tensor.defined()) return std::nullopt;
  auto* storage = ParamStorage::of(tensor.unsafeGetTensorImpl());
  if (storage == nullptr || storage->owner() == nullptr) return std::nullopt;
  auto& port = static_cast<GroupPort&>(*storage->owner());
  auto& group = port.group();
  if (storage->index() >= group.params().size()) return std::nullopt;  // a local shard
  auto& param = group.params()[storage->index()];
  const bool is_unsharded_param = storage->kind() == ParamStorage::Kind::kUnsharded;
  const auto identity = is_unsharded_param ? param.unsharded_param() : param.sharded_param();
  // A view of either is neither.
  if (!identity.is_same(tensor)) return std::nullopt;
  return FoundParam{port.share_group(), storage->index(), is_unsharded_param};
}

}  // namespace fsdp
