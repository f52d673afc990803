#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

#include "param/autograd_settings.hpp"
#include "param/param_spec.hpp"
#include "param/unsharded_tensor.hpp"

namespace fsdp {

/// The tensor of a parameter that `parameters()` and the optimizer see: this rank's rows, in the original dtype, on top of
/// the group's shard. Gradients for the user live on it.
///
/// Does not keep the tensor alive: the module does, as before fully_shard. Not thread-safe: its group's lock guards it.
class ShardedTensor {
 public:
  ShardedTensor() : tensor_(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()) {}

  at::Tensor tensor() const;  ///< undefined once nobody can use it any more
  const at::TensorImpl* identity() const { return identity_; }
  const ParamRef& place() const { return place_; }

  /// Makes it on top of `piece`, whose memory it keeps alive: the tensor that optimizers know, where there is one.
  /// unsharded: it keeps that alive from the first time on.
  void make(const ParamSpec& spec, ParamRef place, const at::Tensor& piece, const AutogradSettings& settings,
            const at::Tensor& unsharded);
  /// Gives up the only strong reference to a new tensor: for the module to hold.
  at::Tensor hand_over() { return initial_.defined() ? std::move(initial_) : tensor(); }
  /// Becomes the one that `other`, of another group, is; nothing of that changes before `make`.
  void take(const ShardedTensor& other);
  /// Between these two.
  bool is_taken() const { return identity_ != nullptr && storage_ == nullptr; }
  /// Another group has taken it over.
  void move_away();

  /// Written, or its storage replaced, since `see_version`.
  bool was_changed() const;
  /// Its storage is not the one that `make` gave it (torch::load, set_data).
  bool was_replaced() const;
  /// Moves with every write.
  int64_t version() const;
  /// Counts as a write.
  void bump_version() const;
  /// The unsharded tensor shows this version from now on. Returns whether it is another one than before.
  bool see_version() { return version() != std::exchange(seen_version_, version()); }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor_;
  c10::TensorImpl* identity_ = nullptr;
  at::Tensor initial_;
  const c10::StorageImpl* storage_ = nullptr;  // that it should have
  ParamRef place_;
  int64_t seen_version_ = 0;
};

}  // namespace fsdp
