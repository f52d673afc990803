#include "base/raw_view.hpp"

namespace fsdp {

namespace {
at::Tensor share_storage(const at::Tensor& base, int64_t offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), base.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(offset);
  return view;
}
}  // namespace

at::Tensor raw_view(const at::Tensor& base, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                    int64_t offset) {
  auto view = share_storage(base, offset);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return view;
}

at::Tensor raw_view(const at::Tensor& base, int64_t numel, int64_t offset) {
  auto view = share_storage(base, offset);
  view.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  return view;
}

c10::Storage empty_storage(c10::Device device) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                            at::DataPtr(nullptr, device), nullptr, /*resizable=*/false));
}

}  // namespace fsdp
