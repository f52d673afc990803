#include "dtensor/whole_storage.hpp"

#include <ATen/ATen.h>
#include <ATen/ops/set_ops.h>
#include <torch/library.h>

#include <numeric>
#include <utility>

#include "base/require.hpp"
#include "base/stable_hash.hpp"
#include "tensor/strides.hpp"

namespace fsdp {

at::Tensor DTensorValue::whole(std::string_view operation) const {
  return partial ? partial->read() : gather(*spec, local, operation);
}

at::Tensor DTensorValue::own_whole(std::string_view operation) const {
  const auto values = whole(operation);
  return at::empty_strided(spec->sizes(), spec->strides(), values.options()).copy_(values);
}

namespace {

size_t bytes_of(const DTensorValue& value) {
  const auto dtype = value.partial ? value.partial->dtype() : value.local.scalar_type();
  return static_cast<size_t>(value.spec->numel()) * c10::elementSize(dtype);
}

}  // namespace

WholeStorage::WholeStorage(DTensorValue value, Message message)
    : StorageImpl(use_byte_size_t(), bytes_of(value), c10::DataPtr(nullptr, at::kMeta), nullptr, /*resizable=*/false),
      value_(std::move(value)),
      message_(message) {
  renamed();
}

void WholeStorage::renamed() {
  std::optional<std::string> text;
  if (message_ == Message::kFull) text = value_.spec->memory_error();
  // Despite its name this frees nothing: it sets the message and the flag.
  release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(text));
}

void WholeStorage::release_resources() {
  value_ = {};
  StorageImpl::release_resources();
}

namespace {

/// LibTorch writes an optimizer's state in the order of addresses, which differ by rank: the ranks would put parts of
/// different tensors together. So they compare what each is about to gather.
void check_same_tensor(const DTensorSpec& spec, at::ScalarType dtype) {
  std::vector<int64_t> all_dims(static_cast<size_t>(spec.ndim()));
  std::iota(all_dims.begin(), all_dims.end(), 0);
  if (all_dims.empty()) all_dims.push_back(0);
  const auto groups = spec.groups_cutting(all_dims);
  if (groups.empty()) return;
  auto hash = stable_hash(spec.name() + sizes_text(spec.sizes()) + c10::toString(dtype));
  const auto own = at::scalar_tensor(static_cast<int64_t>(hash), at::TensorOptions(at::kLong).device(spec.mesh().device()));
  const auto all = gather_parts(own, groups, "torch::save");
  require_state(all.eq(own).all().item<bool>(),
                "torch::save: the ranks are about to write different tensors, this one {} of sizes {}. LibTorch writes an optimizer's "
                "state in another order on each rank: use fsdp::optimizer_state_dict, or fsdp::save_checkpoint. Of a module or a "
                "list of tensors, all ranks write the same one",
                spec.name().empty() ? "a tensor" : "'" + spec.name() + "'", sizes_text(spec.sizes()));
}

/// torch::save of a storage that is not on the CPU is `empty({0}).set_(storage, ...).cpu()`. Here the bytes are gathered, so
/// every rank writes what the unsharded program would: a collective call. Every call of the operator passes BackendSelect, where
/// LibTorch has no kernel of it.
at::Tensor& set_storage(c10::DispatchKeySet keys, at::Tensor& self, c10::Storage source, c10::SymInt offset,
                        c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  if (const auto* storage = WholeStorage::of(source.unsafeGetStorageImpl())) {
    const auto& spec = *storage->value().spec;
    if (storage->value().local.defined()) check_same_tensor(spec, storage->value().local.scalar_type());
    // Exactly as many bytes as the storage says.
    source = storage->value().own_whole("torch::save").storage();
  }
  constexpr c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
  return at::_ops::set__source_Storage_storage_offset::redispatch(keys & below, self, source, offset, size, stride);
}

TORCH_LIBRARY_IMPL(aten, BackendSelect, library) {
  library.impl("set_.source_Storage_storage_offset",
               torch::dispatch(c10::DispatchKey::BackendSelect, TORCH_FN(set_storage)));
}

}  // namespace

}  // namespace fsdp
