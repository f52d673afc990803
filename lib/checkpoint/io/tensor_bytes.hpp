#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <span>

// A tensor's elements, read row-major, as the bytes of a file: from any device, in another dtype if need be.
namespace fsdp {

/// Reads them. Where memory and file say the same, the tensor's own memory is lent out; else it works in windows.
class TensorSource {
 public:
  TensorSource(const at::Tensor& tensor, at::ScalarType file_dtype, int64_t window_bytes);
  /// At most this many elements can be asked for at once.
  int64_t max_count() const { return max_count_; }
  /// Valid until the next call.
  std::span<const std::byte> read(int64_t begin, int64_t count);

 private:
  at::Tensor flat_, window_;
  at::ScalarType file_dtype_;
  int64_t max_count_, element_bytes_;
  int64_t window_begin_ = 0;
};

/// Writes them. What follows one another is put together before it is converted or goes to a device.
/// All is there after `finish`.
class TensorSink {
 public:
  TensorSink(const at::Tensor& tensor, at::ScalarType file_dtype, int64_t window_bytes);
  /// The memory for elements of the file, to be filled by the caller: the tensor's own, or a window's. At most
  /// max_count() elements.
  std::span<std::byte> place(int64_t begin, int64_t count);
  int64_t max_count() const { return max_count_; }
  void finish();

 private:
  void flush();
  at::Tensor tensor_, flat_, window_;
  int64_t max_count_, element_bytes_;
  bool is_direct_, is_copy_;
  int64_t window_begin_ = 0, window_count_ = 0;
};

}  // namespace fsdp
