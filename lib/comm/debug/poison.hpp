#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace fsdp {

/// Note [Poison]
/// Every byte is 0xFF: a NaN in each floating-point dtype, 8 bits ones included, and -1 or the largest
/// number in integers. One pattern for all, because most buffers hold bytes of several dtypes.
inline constexpr uint8_t kPoison = 0xFF;

/// Overwrites the elements of a contiguous tensor. Not recorded, no version moves.
void poison(const at::Tensor& tensor);

/// Poisons a tensor's whole memory if nobody but the caller's reference keeps it.
void poison_if_last(const at::Tensor& tensor);

/// The first byte of a contiguous tensor that is not poison; nullopt if all are.
std::optional<int64_t> first_written_byte(const at::Tensor& tensor);

/// Returns a hash of a contiguous tensor's bytes.
uint64_t content_hash(const at::Tensor& tensor);

}  // namespace fsdp
