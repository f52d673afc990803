// Copies within a late device and between it and the host, and what reads one number.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <stdexcept>

#include "late_operators.hpp"
#include "late_pinned.hpp"
#include "late_streams.hpp"

namespace fsdp::test {
namespace {

/// As a kernel below autograd's, which is what a stream runs.
void copy_host(const at::Tensor& to, const at::Tensor& from) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  to.copy_(from);
}

void copy_within(const at::Tensor& from, const at::Tensor& to) {
  if (from.device() != to.device()) throw std::logic_error("late device: no copies from one device to another");
  enqueue_late(to.device().index(), "a copy",
               [from = host_view(from), to = host_view(to)] { copy_host(to, from); });
}

/// Only pinned memory is read later; the host has to wait, or what it has is set aside.
void copy_to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto index = to.device().index();
  const auto pinned = non_blocking ? pinned_block_of(from.const_data_ptr()) : nullptr;
  const auto source = pinned ? host_view(from) : from.detach().clone();
  enqueue_late(index, "a copy from the host",
               [source, pinned, to = host_view(to)] { copy_host(to, source); });
  if (!non_blocking) wait_for_late(index);
}

void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto index = from.device().index();
  const auto pinned = non_blocking ? pinned_block_of(to.const_data_ptr()) : nullptr;
  enqueue_late(index, "a copy to the host",
               [from = host_view(from), pinned, to = host_view(to)] { copy_host(to, from); });
  if (!pinned) wait_for_late(index);  // as CUDA does with memory that is not pinned
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  const auto source = from.sizes() == to.sizes() ? from : from.expand(to.sizes());
  if (is_late(source.device()) && is_late(to.device()))
    copy_within(source, to);
  else if (is_late(to.device()))
    copy_to_device(source, to, non_blocking);
  else
    copy_to_host(source, to, non_blocking);
  return to;
}

at::Scalar local_scalar(const at::Tensor& self) {
  wait_for_late(self.device().index());
  const at::AutoDispatchBelowADInplaceOrView guard;
  return at::_local_scalar_dense(host_view(self));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_local_scalar_dense", TORCH_FN(local_scalar));
}

}  // namespace
}  // namespace fsdp::test
