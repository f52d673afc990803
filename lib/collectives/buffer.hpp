#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "fsdp/custom_comm.hpp"

namespace fsdp {

/// Memory for one of the runtime's own buffers: 1-D, contiguous, not initialised. All of them come
/// from here.
///
/// A group's buffer is released and made again several times a step, and fresh memory costs a page
/// fault every 4 KiB, as much time as the copy that fills it. On Linux the kernel is asked for
/// huge pages (2 MiB) where a large CPU buffer covers them whole. Under GuardedBuffers it is poison.
at::Tensor make_buffer(int64_t numel, const at::TensorOptions& options);

/// Makes one by a user's allocator; null: by ours. Throws UsageError naming `subject`, the group, if what it
/// gives is something else.
at::Tensor make_buffer(int64_t numel, const at::TensorOptions& options, Comm* custom,
                       std::string_view subject);

/// While it lives, `make_buffer` on this thread adds the bytes of what it gives to `bytes`; of several, the innermost.
class CountedBuffers {
 public:
  explicit CountedBuffers(int64_t& bytes);
  ~CountedBuffers();
  CountedBuffers(const CountedBuffers&) = delete;
  CountedBuffers& operator=(const CountedBuffers&) = delete;

 private:
  int64_t* outer_;
};

}  // namespace fsdp
