#include "checkpoint/io/tensor_bytes.hpp"

#include <ATen/ATen.h>

#include <algorithm>

#include "base/plain_values.hpp"

namespace fsdp {

namespace {

bool is_direct(const at::Tensor& tensor, at::ScalarType file_dtype) {
  return tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == file_dtype && is_plain(tensor);
}

int64_t window_count(int64_t window_bytes, int64_t element_bytes) { return std::max<int64_t>(1, window_bytes / element_bytes); }

}  // namespace

TensorSource::TensorSource(const at::Tensor& tensor, at::ScalarType file_dtype, int64_t window_bytes)
    : file_dtype_(file_dtype), element_bytes_(static_cast<int64_t>(c10::elementSize(file_dtype))) {
  at::NoGradGuard no_grad;
  const bool direct = is_direct(tensor, file_dtype);
  flat_ = tensor.detach().reshape({-1});
  max_count_ = direct ? std::max<int64_t>(1, flat_.numel()) : window_count(window_bytes, element_bytes_);
  if (direct) window_ = flat_;
}

std::span<const std::byte> TensorSource::read(int64_t begin, int64_t count) {
  if (!window_.defined() || begin < window_begin_ || begin + count > window_begin_ + window_.numel()) {
    at::NoGradGuard no_grad;
    // More than was asked for: small pieces mostly follow one another.
    const int64_t until = std::min(flat_.numel(), begin + max_count_);
    window_ = flat_.narrow(0, begin, until - begin).to(at::TensorOptions().device(at::kCPU).dtype(file_dtype_)).contiguous();
    window_begin_ = begin;
  }
  const auto* first = static_cast<const std::byte*>(window_.const_data_ptr());
  return {first + (begin - window_begin_) * element_bytes_, static_cast<size_t>(count * element_bytes_)};
}

TensorSink::TensorSink(const at::Tensor& tensor, at::ScalarType file_dtype, int64_t window_bytes)
    : tensor_(tensor.detach()),
      element_bytes_(static_cast<int64_t>(c10::elementSize(file_dtype))),
      is_direct_(is_direct(tensor, file_dtype)),
      is_copy_(!tensor.is_contiguous()) {
  at::NoGradGuard no_grad;
  // A copy begins with the tensor's values: not all of them need be loaded.
  flat_ = is_copy_ ? tensor_.contiguous().view({-1}) : tensor_.view({-1});
  max_count_ = is_direct_ ? std::max<int64_t>(1, flat_.numel()) : window_count(window_bytes, element_bytes_);
  if (!is_direct_)
    window_ = at::empty({std::min(max_count_, std::max<int64_t>(1, flat_.numel()))}, at::device(at::kCPU).dtype(file_dtype));
}

std::span<std::byte> TensorSink::place(int64_t begin, int64_t count) {
  if (is_direct_) {
    auto* first = static_cast<std::byte*>(flat_.mutable_data_ptr());
    return {first + begin * element_bytes_, static_cast<size_t>(count * element_bytes_)};
  }
  if (begin != window_begin_ + window_count_ || window_count_ + count > window_.numel()) {
    flush();
    window_begin_ = begin;
  }
  auto* first = static_cast<std::byte*>(window_.mutable_data_ptr());
  first += window_count_ * element_bytes_;
  window_count_ += count;
  return {first, static_cast<size_t>(count * element_bytes_)};
}

void TensorSink::flush() {
  at::NoGradGuard no_grad;
  if (window_count_ > 0) flat_.narrow(0, window_begin_, window_count_).copy_(window_.narrow(0, 0, window_count_));
  window_count_ = 0;
}

void TensorSink::finish() {
  at::NoGradGuard no_grad;
  if (!is_direct_) flush();
  if (is_copy_) tensor_.copy_(flat_.view(tensor_.sizes()));
  // What was written past LibTorch is a write too, of which autograd has to know; and groups compare versions, which
  // move on all ranks or on none.
  else if (!tensor_.is_inference()) tensor_.unsafeGetTensorImpl()->bump_version();
}

}  // namespace fsdp
