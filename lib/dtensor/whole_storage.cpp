#include "dtensor/whole_storage.hpp"

#include <ATen/ATen.h>
#include <ATen/ops/set_ops.h>
#include <fmt/format.h>
#include <torch/library.h>

#include <utility>

namespace fsdp {

at::Tensor DTensorValue::whole(std::string_view operation) const {
  return partial ? partial->read() : spec->gather(local, operation);
}

namespace {

size_t bytes_of(const DTensorValue& value) {
  const auto dtype = value.partial ? value.partial->dtype() : value.local.scalar_type();
  return static_cast<size_t>(value.spec->numel()) * c10::elementSize(dtype);
}

}  // namespace

WholeStorage::WholeStorage(DTensorValue value, Message message)
    : StorageImpl(use_byte_size_t(), bytes_of(value), c10::DataPtr(nullptr, at::kMeta), nullptr, /*resizable=*/false),
      value_(std::move(value)) {
  std::optional<std::string> text;
  if (message == Message::kFull)
    text = fmt::format("{} is sharded over ranks and has no memory of its own: read this rank's part with "
                       "fsdp::to_local(tensor), the whole with fsdp::full_tensor(tensor)",
                       value_.spec->name().empty() ? "this tensor" : value_.spec->name());
  // Despite its name this frees nothing: it sets the message and the flag.
  release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(text));
}

namespace {

/// torch::save of a storage that is not on the CPU is `empty({0}).set_(storage, ...).cpu()`. Here the bytes are gathered, so
/// every rank writes what the unsharded program would: a collective call. Every call of the operator passes BackendSelect, where
/// LibTorch has no kernel of it.
at::Tensor& set_storage(c10::DispatchKeySet keys, at::Tensor& self, c10::Storage source, c10::SymInt offset,
                        c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  if (const auto* storage = WholeStorage::of(source.unsafeGetStorageImpl())) {
    const auto whole = storage->value().whole("torch::save");
    const auto& spec = *storage->value().spec;
    // Exactly as many bytes as the storage says.
    source = at::empty_strided(spec.sizes(), spec.strides(), whole.options()).copy_(whole).storage();
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
