#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "param/autograd_settings.hpp"
#include "param/param_spec.hpp"
#include "param/shared_autograd.hpp"
#include "param/unsharded_tensor.hpp"

namespace fsdp {

/// This rank's rows of a parameter, in the original dtype, on top of the group's shard, and the gradient that the user is to
/// see of them. `parameters()` and the optimizer see it as a DTensor around it, or itself (ParamSpec::dtensor): what is
/// registered.
///
/// Does not keep what is registered alive: the module does, as before fully_shard. Not thread-safe: its group's lock guards it.
class ShardedTensor {
 public:
  ShardedTensor() : tensor_(Strong()), registered_(Strong()) {}

  at::Tensor tensor() const;  ///< undefined once nobody can use it any more
  /// Returns the tensor for a look, without a reference; null once nobody can use it any more.
  c10::TensorImpl* peek() const { return tensor_.expired() ? nullptr : tensor_._unsafe_get_target(); }
  /// Returns what modules hold and users see of it; undefined once nobody can use it any more.
  at::Tensor registered() const;
  c10::TensorImpl* peek_registered() const { return registered_.expired() ? nullptr : registered_._unsafe_get_target(); }
  /// Returns the address of what is registered, to be compared: it may be gone. Null: there is none.
  const at::TensorImpl* identity() const { return identity_; }
  /// Returns what it has in common with the unsharded tensor; null without a DTensor.
  const std::shared_ptr<SharedAutograd>& shared() const { return shared_; }
  const ParamRef& place() const { return place_; }

  /// Makes it on top of `piece`, whose memory it keeps alive: the tensor that optimizers know, where there is one.
  /// unsharded: it keeps that alive from the first time on.
  void make(const ParamSpec& spec, ParamRef place, const at::Tensor& piece, const AutogradSettings& settings,
            const at::Tensor& unsharded);
  /// Leaves its storage to tensors beside it that show its rows, if there are any: views of the DTensor, `data()`. These keep
  /// the values of now, in memory of their own, and it goes on around a new tensor over `piece`, where its rows lie.
  void leave_to_aliases(const ParamSpec& spec, const at::Tensor& piece, const at::Tensor& unsharded);
  /// Gives up the only strong reference to a new tensor: for the module to hold.
  at::Tensor hand_over() { return initial_.defined() ? std::move(initial_) : registered(); }
  /// Becomes the one that `other`, of another group, is; nothing of that changes before `make`.
  void take(const ShardedTensor& other);
  /// True between `take` and `make`.
  bool is_taken() const { return identity_ != nullptr && storage_ == nullptr; }
  /// Forgets the tensors: another group has taken them over.
  void move_away();

  /// True if it was written, or its storage replaced, since `see_version`.
  bool was_changed() const {
    const auto* impl = peek();
    return impl != nullptr && (version_of(*impl) != seen_version_ || impl->unsafe_storage().unsafeGetStorageImpl() != storage_);
  }
  /// True if its storage is not the one that `make` gave it (torch::load, set_data).
  bool was_replaced() const {
    const auto* impl = peek();
    return impl != nullptr && impl->unsafe_storage().unsafeGetStorageImpl() != storage_;
  }
  /// Returns a number that moves with every write.
  int64_t version() const { return counted() + uncounted_; }
  /// Moves the version, as a write does.
  void bump_version() const;
  /// Notes a write: the unsharded tensor no longer shows it. Returns whether its version has moved, which the unsharded
  /// tensor's is to follow. A write through `data()` moves none, as in any tensor.
  bool note_write() {
    seen_version_ = kOutdated;
    const bool has_moved = follow_version();
    if (!has_moved) ++uncounted_;
    return has_moved;
  }
  /// Notes that the unsharded tensor shows this version from now on. Returns what `note_write` does.
  bool see_version() {
    seen_version_ = counted();
    return follow_version();
  }

 private:
  using Strong = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  static constexpr int64_t kOutdated = -1;

  bool has_aliases() const;
  /// Makes a tensor of the parameter's rows over `piece`.
  at::Tensor rows_on(const ParamSpec& spec, const at::Tensor& piece) const;
  void begin(const ParamSpec& spec, const at::Tensor& local, const AutogradSettings& settings, const at::Tensor& unsharded);
  /// Returns the tensor's own version, which writes through `data()` do not move.
  int64_t counted() const {
    const auto* impl = peek();
    return impl != nullptr ? version_of(*impl) : followed_version_;
  }
  bool follow_version() { return counted() != std::exchange(followed_version_, counted()); }

  static int64_t version_of(const c10::TensorImpl& impl) {
    return static_cast<int64_t>(impl.version_counter().current_version());
  }

  Weak tensor_, registered_;  // the same without a DTensor
  c10::TensorImpl* identity_ = nullptr;
  std::shared_ptr<SharedAutograd> shared_;
  at::Tensor initial_;
  const c10::StorageImpl* storage_ = nullptr;  // that it should have
  ParamRef place_;
  int64_t seen_version_ = 0;      // that the unsharded tensor shows
  int64_t followed_version_ = 0;  // with which the unsharded tensor's has moved
  int64_t uncounted_ = 0;         // writes through `data()`
};

}  // namespace fsdp
