#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <optional>

namespace fsdp {

/// Host memory in which a group's shards and gradients live, apart from where it computes.
struct HostMemory {
  bool is_pinned = false;  ///< all of it: what `options` makes is
  at::TensorOptions options(at::ScalarType dtype) const {
    return at::TensorOptions().dtype(dtype).device(at::kCPU).pinned_memory(is_pinned);
  }
};

/// Copies between a group's host memory and its device, some of them still under way. Not thread-safe: the
/// root's lock guards it.
class HostCopies {
 public:
  /// kOverlapped: the host does not wait; `wait` does. For pinned memory alone: nobody asks the driver whether it is.
  enum class Pace { kBlocking, kOverlapped };

  /// Runs on the device's current stream. The memory of both may be given back at once.
  void copy(const at::Tensor& from, const at::Tensor& to, Pace pace);
  /// All of them are done when this returns: the host may read what came, and write what was sent.
  void wait();

 private:
  std::optional<c10::Event> last_;  // behind all of them
};

}  // namespace fsdp
