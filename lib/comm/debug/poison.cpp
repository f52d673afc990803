#include "comm/debug/poison.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <cstring>

namespace fsdp {

namespace {

/// The memory of a contiguous tensor as bytes.
at::Tensor bytes_of(const at::Tensor& tensor) {
  const auto itemsize = static_cast<int64_t>(tensor.element_size());
  auto bytes = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(tensor.storage()),
      c10::DispatchKeySet(c10::computeDispatchKey(at::kByte, tensor.layout(), tensor.device())),
      caffe2::TypeMeta::Make<uint8_t>());
  bytes.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset() * itemsize);
  bytes.unsafeGetTensorImpl()->set_sizes_contiguous({tensor.numel() * itemsize});
  return bytes;
}

/// Returns those bytes, copied to the host if they are not there.
at::Tensor on_host(const at::Tensor& tensor) {
  const auto bytes = bytes_of(tensor);
  return bytes.is_cpu() ? bytes : bytes.cpu();
}

uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9E3779B97F4A7C15ULL;
  return hash ^ (hash >> 29);
}

}  // namespace

void poison(const at::Tensor& tensor) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (tensor.numel() == 0) return;
  if (tensor.is_cpu())
    std::memset(tensor.mutable_data_ptr(), kPoison, tensor.nbytes());
  else
    bytes_of(tensor).fill_(kPoison);
}

void poison_if_last(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.use_count() > 1 ||
      tensor.storage().use_count() > 1)
    return;
  auto whole = bytes_of(tensor);
  whole.unsafeGetTensorImpl()->set_storage_offset(0);
  whole.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(tensor.storage().nbytes())});
  poison(whole);
}

std::optional<int64_t> first_written_byte(const at::Tensor& tensor) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto bytes = on_host(tensor);
  const auto* data = bytes.const_data_ptr<uint8_t>();
  const int64_t count = bytes.numel();
  if (count == 0) return std::nullopt;
  // All are like the first, and that is poison: the usual case at memcmp's speed.
  if (data[0] == kPoison && std::memcmp(data, data + 1, static_cast<size_t>(count - 1)) == 0)
    return std::nullopt;
  int64_t i = 0;
  while (data[i] == kPoison) ++i;
  return i;
}

uint64_t content_hash(const at::Tensor& tensor) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto bytes = on_host(tensor);
  const auto* data = bytes.numel() > 0 ? bytes.const_data_ptr<uint8_t>() : nullptr;
  const auto count = static_cast<size_t>(bytes.numel());
  constexpr size_t kLanes = 4, kStride = kLanes * sizeof(uint64_t);
  uint64_t lanes[kLanes] = {1, 2, 3, 4};
  size_t i = 0;
  for (; i + kStride <= count; i += kStride) {
    uint64_t words[kLanes];
    std::memcpy(words, data + i, kStride);
    for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] = mix(lanes[lane], words[lane]);
  }
  uint64_t hash = count;
  for (const uint64_t lane : lanes) hash = mix(hash, lane);
  for (; i < count; ++i) hash = mix(hash, data[i]);
  return hash;
}

}  // namespace fsdp
