#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "group/host_copies.hpp"

namespace fsdp {

/// Where this rank's rows of a group's parameters live: on the group's device, in host memory where parameters are
/// offloaded, or, at one rank, where they were before. Not thread-safe: the root's lock guards it.
class ShardBuffer {
 public:
  ShardBuffer() = default;
  /// host_memory: none: rows live where they are used.
  explicit ShardBuffer(std::optional<HostMemory> host_memory) : host_memory_(host_memory) {}

  /// 1-D bytes for rows that are used on `device`, zero: the gaps between them travel, so they are defined.
  at::Tensor make(int64_t bytes, c10::Device device) const;
  /// The rows lie there from now on. bytes: as `make` gave it; undefined: every piece is memory of its own.
  /// pieces: by parameter, 1-D bytes.
  void set(at::Tensor bytes, std::vector<at::Tensor> pieces);

  const at::Tensor& bytes() const { return bytes_; }
  const std::vector<at::Tensor>& pieces() const { return pieces_; }
  const at::Tensor& piece(size_t index) const { return pieces_[index]; }

  /// Says where rows lie that are used on `device`, and their gradients.
  c10::Device home_of(c10::Device device) const {
    return host_memory_ && !device.is_meta() ? c10::Device(at::kCPU) : device;
  }
  /// What these are made with.
  at::TensorOptions options(at::ScalarType dtype, c10::Device device) const {
    return host_memory_ && !device.is_meta() ? host_memory_->options(dtype) : at::TensorOptions().dtype(dtype).device(device);
  }
  /// Between the host and the device, on its current stream. may_overlap: the host need not wait, where the memory lets
  /// it; `wait_for_copies` does then.
  void copy(const at::Tensor& from, const at::Tensor& to, bool may_overlap);
  /// The host may read gradients and write shards when this returns.
  void wait_for_copies() { copies_.wait(); }

 private:
  at::Tensor bytes_;
  std::vector<at::Tensor> pieces_;
  std::optional<HostMemory> host_memory_;
  HostCopies copies_;
};

}  // namespace fsdp
