#include "dispatch/shard_copy.hpp"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include "base/require.hpp"
#include "dispatch/residency.hpp"

namespace fsdp {

namespace {

struct ShardCopyMark final : c10::BackendMeta {
  ShardCopyMark(const c10::TensorImpl* copy, std::string name)
      : copy(copy), param_name(std::move(name)) {}
  const c10::TensorImpl* copy;  // only compared: it may be gone
  std::string param_name;
};

}  // namespace

void mark_shard_copy(const at::Tensor& copy, const std::string& param_name) {
  auto* impl = copy.unsafeGetTensorImpl();
  impl->set_backend_meta(c10::make_intrusive<ShardCopyMark>(impl, param_name));
  add_residency_key(copy);
}

void refuse_moved_copy(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto meta = impl->get_backend_meta_intrusive_ptr();
  const auto* mark = dynamic_cast<const ShardCopyMark*>(meta.get());
  if (mark == nullptr || mark->copy == impl || !impl->requires_grad() || !tensor.is_leaf()) return;
  throw StateError(fmt::format(
      "{}: a tensor of sizes {} stands where a module expects the whole parameter: it is a copy of this "
      "rank's part, as LibTorch's clone() of a sharded module makes it. Use fsdp::clone(module)",
      mark->param_name, fmt::join(tensor.sizes(), "x")));
}

}  // namespace fsdp
