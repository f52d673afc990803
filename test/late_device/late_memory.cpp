// Operators that make memory or look at it otherwise, and run on no stream.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "late_allocator.hpp"
#include "late_operators.hpp"

namespace fsdp::test {

at::Tensor host_view(const at::Tensor& on_late) {
  auto* memory = const_cast<void*>(on_late.const_data_ptr());
  return at::from_blob(memory, on_late.sizes(), on_late.strides(), at::TensorOptions(on_late.scalar_type()));
}

void resize_late(const at::Tensor& on_late, at::IntArrayRef sizes) {
  auto* impl = on_late.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  const auto& storage = impl->unsafe_storage();
  const size_t bytes = at::detail::computeStorageNbytesContiguous(sizes, on_late.element_size(),
                                                                  static_cast<size_t>(on_late.storage_offset()));
  if (bytes <= storage.nbytes()) return;
  const c10::DeviceGuard guard(on_late.device());
  auto* inner = storage.unsafeGetStorageImpl();
  inner->set_data_ptr_noswap(late_allocator().allocate(bytes));
  inner->set_nbytes(bytes);
}

namespace {

constexpr auto kLateKeys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                 std::optional<at::Device> device, std::optional<bool> /*is_pinned*/,
                 std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, &late_allocator(), kLateKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
                         std::optional<bool> /*is_pinned*/) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, &late_allocator(), kLateKeys,
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> /*format*/) {
  resize_late(self, sizes);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, sizes, strides);
}

at::Tensor& set_to_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

/// `set_data` asks: a tensor of the host's may become one of the device's, as on a GPU.
bool can_take_place(const at::Tensor& self, const at::Tensor& from) {
  return self.layout() == at::kStrided && from.layout() == at::kStrided;
}

void record_stream(at::Tensor& self, c10::Stream stream) { record_late_stream(self.storage().data_ptr(), stream); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("resize_", TORCH_FN(resize));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  library.impl("set_.source_Tensor", TORCH_FN(set_to_tensor));
  library.impl("_has_compatible_shallow_copy_type", TORCH_FN(can_take_place));
  library.impl("record_stream", TORCH_FN(record_stream));
}

}  // namespace
}  // namespace fsdp::test
