#include "group/shard_buffer.hpp"

#include <ATen/ATen.h>

namespace fsdp {

at::Tensor ShardBuffer::make(int64_t bytes, c10::Device device) const {
  return at::zeros({bytes}, options(at::kByte, device));
}

void ShardBuffer::set(at::Tensor bytes, std::vector<at::Tensor> pieces) {
  bytes_ = std::move(bytes);
  pieces_ = std::move(pieces);
}

void ShardBuffer::copy(const at::Tensor& from, const at::Tensor& to, bool may_overlap) {
  const bool overlaps = may_overlap && host_memory_ && host_memory_->is_pinned;
  copies_.copy(from, to, overlaps ? HostCopies::Pace::kOverlapped : HostCopies::Pace::kBlocking);
}

}  // namespace fsdp
