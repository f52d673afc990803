#include "root/find_param.hpp"

#include "dtensor/dtensor_impl.hpp"

namespace fsdp {

std::optional<FoundParam> find_param(const at::Tensor& tensor) {
  if (!tensor.defined()) return std::nullopt;
  const auto* dtensor = DTensorImpl::of(tensor);
  if (dtensor != nullptr && !dtensor->local().defined()) return std::nullopt;
  auto* storage = ParamStorage::of(dtensor != nullptr ? dtensor->local().unsafeGetTensorImpl() : tensor.unsafeGetTensorImpl());
  if (storage == nullptr || storage->owner() == nullptr) return std::nullopt;
  auto& port = static_cast<GroupPort&>(*storage->owner());
  auto& group = port.group();
  if (storage->index() >= group.params().size()) return std::nullopt;  // a local shard
  auto& param = group.params()[storage->index()];
  const bool is_unsharded_param = storage->kind() == ParamStorage::Kind::kUnsharded;
  // A view of any of them is none of them.
  const auto* impl = tensor.unsafeGetTensorImpl();
  const bool is_it = is_unsharded_param ? param.unsharded.peek() == impl
                                        : param.sharded.peek_registered() == impl || param.sharded.peek() == impl;
  if (!is_it) return std::nullopt;
  return FoundParam{port.share_group(), storage->index(), is_unsharded_param};
}

}  // namespace fsdp
