// Operators of the simulated device: those that make memory or look at it otherwise, copies, and the CPU's for the rest.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "extension/simulated_device/simulated_device.hpp"
#include "extension/simulated_device/simulated_memory.hpp"

namespace fsdp::bench {
namespace {

constexpr auto kKeys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                 std::optional<at::Device> /*device*/, std::optional<bool> /*is_pinned*/,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &simulated_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> /*layout*/, std::optional<at::Device> /*device*/,
                         std::optional<bool> /*is_pinned*/) {
  return at::detail::empty_strided_generic(sizes, strides, &simulated_allocator(), kKeys, c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> /*format*/) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  const size_t bytes = at::detail::computeStorageNbytesContiguous(sizes, self.element_size(),
                                                                  static_cast<size_t>(self.storage_offset()));
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) resize_simulated(*storage, bytes);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, sizes, strides);
}

at::Tensor& set_to_tensor(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }

/// `set_data` asks: a tensor of the host's may become one of the device's, as on a GPU.
bool can_take_place(const at::Tensor& self, const at::Tensor& from) {
  return self.layout() == at::kStrided && from.layout() == at::kStrided;
}

/// Memory is never reused while something is to run on it: nothing does later than the host says.
void record_stream(at::Tensor& /*self*/, c10::Stream /*stream*/) {}

/// The CPU's kernels fetch their tensors without the device's knowing.
thread_local bool is_falling_back = false;

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  auto* memory = const_cast<void*>(tensor.const_data_ptr());
  return at::from_blob(memory, tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.scalar_type()));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  // The host reads: it has to wait, unless it says that it does so later.
  if (to.is_cpu() && !non_blocking && !is_falling_back) current_simulated_stream().synchronize();
  if (to.numel() == 0) return to;
  const at::AutoDispatchBelowADInplaceOrView guard;
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, /*non_blocking=*/true);
}

at::Scalar local_scalar(const at::Tensor& self) {
  if (!is_falling_back) current_simulated_stream().synchronize();
  const at::AutoDispatchBelowADInplaceOrView guard;
  return at::_local_scalar_dense(on_host(self));
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  struct Flag {
    bool before = std::exchange(is_falling_back, true);
    ~Flag() { is_falling_back = before; }
  } flag;
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

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
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  library.impl("_local_scalar_dense", TORCH_FN(local_scalar));
}

}  // namespace
}  // namespace fsdp::bench
