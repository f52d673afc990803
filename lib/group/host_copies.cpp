#include "group/host_copies.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace fsdp {

void HostCopies::copy(const at::Tensor& from, const at::Tensor& to, Pace pace) {
  const auto& other = from.is_cpu() ? to : from;
  const bool overlaps = pace == Pace::kOverlapped && !other.is_cpu();
  to.copy_(from, /*non_blocking=*/overlaps);
  if (!overlaps) return;
  const auto device = other.device();
  const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  // Forward and backward may run on different streams; the newest is to be behind all.
  if (last_)
    last_->block(stream);
  else
    last_.emplace(device.type());
  last_->record(stream);
}

void HostCopies::wait() {
  if (!last_) return;
  last_->synchronize();
  last_.reset();
}

}  // namespace fsdp
