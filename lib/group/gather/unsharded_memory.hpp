#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <optional>
#include <utility>

#include "base/side_stream.hpp"

namespace fsdp {

/// What a group's unsharded parameters lie in, and the buffer of a released group that keeps it for its next gather.
class UnshardedMemory {
 public:
  /// 1-D bytes; undefined while the group is released.
  const at::Tensor& bytes() const { return bytes_; }
  void set(at::Tensor bytes) { bytes_ = std::move(bytes); }
  /// They are a slot's, which is another's to keep (GatherSlots): so from the launch of the gather on.
  void set_is_slot(bool value) { is_slot_ = value; }
  bool is_slot() const { return is_slot_; }
  void release() {
    if (keeps_ && !is_slot_) {
      const auto device = bytes_.device();
      kept_ = std::move(bytes_);
      if (SideStream::exists_on(device)) record(released_, current_stream(device));
    }
    bytes_.reset();
  }

  /// From the next release on; what is kept already goes if not.
  void set_keeps(bool keeps) {
    keeps_ = keeps;
    if (!keeps) kept_.reset();
  }
  bool keeps() const { return keeps_; }
  int64_t kept_bytes() const { return kept_.defined() ? kept_.numel() : 0; }
  void drop_kept() { kept_.reset(); }
  /// Undefined: nothing is kept.
  at::Tensor take_kept() { return std::exchange(kept_, {}); }
  /// The current stream goes on behind the last use of what is kept.
  void wait_for_last_use(c10::Device device) const {
    if (kept_.defined()) released_->block(current_stream(device));
  }

 private:
  at::Tensor bytes_, kept_;
  std::optional<c10::Event> released_;  // behind the last use of what is kept
  bool keeps_ = false, is_slot_ = false;
};

}  // namespace fsdp
