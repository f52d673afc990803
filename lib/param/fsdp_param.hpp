#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "dispatch/param_storage.hpp"
#include "param/grad_dtype.hpp"
#include "tensor/shard_layout.hpp"

namespace fsdp {

/// One parameter with its two identities: the *unsharded parameter*, which the module's member holds and
/// `forward` reads (full shape), and the *sharded parameter*, which `parameters()` and the
/// optimizer see (this rank's rows). Gradients for the user live on the sharded one.
///
/// The sharded parameter has the original dtype, the unsharded parameter the one that is gathered and computed in.
///
/// It keeps neither alive. The module keeps the sharded parameter, as before; the sharded parameter
/// keeps the unsharded parameter (a ParameterList has no member that would); the unsharded parameter's storage keeps the group. Not thread-safe: its group's lock guards it.
class FSDPParam {
 public:
  /// Changes nothing yet. layout: of the unsharded parameter's sizes, with `kept_strides(unsharded_param)`.
  FSDPParam(std::string name, const at::Tensor& unsharded_param, at::ScalarType param_dtype,
               ShardLayout layout, int rank);

  /// The strides that the unsharded parameter has from fully_shard on: its own if they leave no gaps or overlaps
  /// (channels-last and transposed ones too), else row-major.
  static std::vector<int64_t> kept_strides(const at::Tensor& unsharded_param);

  const std::string& name() const { return name_; }
  const ShardLayout& layout() const { return layout_; }
  at::ScalarType dtype() const { return dtype_; }  ///< of the sharded parameter
  at::ScalarType param_dtype() const { return param_dtype_; }  ///< of the unsharded parameter
  bool is_cast() const { return param_dtype_ != dtype_; }
  /// The whole parameter's sizes and strides in memory.
  const std::vector<int64_t>& sizes() const { return layout_.sizes(); }
  const std::vector<int64_t>& strides() const { return layout_.strides(); }
  /// Bytes of the whole parameter in the dtype that is gathered.
  int64_t unsharded_bytes() const {
    return layout_.numel() * static_cast<int64_t>(c10::elementSize(param_dtype_));
  }
  /// Bytes of this rank's part, without padding.
  int64_t local_bytes() const { return layout_.local_numel(rank_) * itemsize_; }

  /// Becomes what `other`, of another group, is: its sharded tensor, dtype and requires_grad. Nothing of
  /// `other` changes, nor does the tensor before `make_sharded_param`.
  void take_identity(const FSDPParam& other);
  /// Between these two.
  bool is_taken() const { return sharded_impl_ != nullptr && expected_storage_ == nullptr; }
  /// Another group has taken it over: nothing is left here but the place.
  void move_away();
  bool has_moved_away() const { return has_moved_away_; }

  /// Copies this rank's part of `whole`, of sizes(), to `piece` (1-D bytes, local_bytes() long or more), then
  /// zeros.
  void copy_part_to(const at::Tensor& piece, const at::Tensor& whole) const;
  /// The unsharded parameter's own memory as a piece, if it can serve as one (one rank, nothing to rearrange);
  /// else undefined.
  at::Tensor own_memory(c10::Device device) const;
  /// Makes the sharded parameter on top of `piece`, whose memory it keeps alive.
  void make_sharded_param(OwnerLink owner, size_t index, const at::Tensor& piece);
  /// Turns the tensor into the unsharded parameter: managed storage, residency key. From here on the parameter is sharded.
  void attach(const std::shared_ptr<ParamOwner>& owner, size_t index,
                        c10::Device device);

  /// Makes the unsharded parameter an ordinary tensor that shares `whole`'s memory, dtype and device, for a while: no
  /// operator on it is looked at. Returns the managed storage, for `restore_unsharded`. `whole` has sizes().
  c10::Storage set_unsharded_aside(const at::Tensor& whole);
  /// The unsharded parameter is what `attach` made of it again; nothing to do once the module is gone.
  void restore_unsharded(c10::Storage storage);

  at::Tensor unsharded_param() const;  ///< undefined once the module is gone
  at::Tensor sharded_param() const;  ///< undefined once nobody can use it any more
  const at::TensorImpl* sharded_impl() const { return sharded_impl_; }
  /// Gives up the only strong reference to a new sharded parameter: for the module to hold.
  at::Tensor hand_over_sharded() {
    return initial_sharded_.defined() ? std::move(initial_sharded_) : sharded_param();
  }
  UnshardedStorage* storage() const { return storage_; }
  void storage_gone() { storage_ = nullptr; }
  void rename(std::string name);

  /// Casts a piece (1-D bytes) to what is gathered (1-D bytes, as many elements).
  void cast_piece(const at::Tensor& piece, const at::Tensor& gathered) const;
  /// Takes this rank's part of the unsharded parameter (1-D bytes, unsharded_bytes() long) over into its
  /// piece. shown: what all ranks saw of the piece (1-D, as long or longer, param_dtype), where that is not
  /// the piece itself or its cast; elements that still show it keep their value.
  void write_back(const at::Tensor& unsharded, const at::Tensor& piece, const at::Tensor& shown = {}) const;

  /// Once per gather: if the sharded parameter has been written since the last one, moves the
  /// unsharded parameter's version too, so that autograd refuses a backward through stale values as LibTorch does.
  void sync_version();
  /// Written, or its storage replaced, since then.
  bool was_changed() const;
  /// Of the sharded parameter, which moves with every write.
  int64_t version() const { return current_version(); }
  /// Counts as a write to the sharded parameter.
  void bump_version();
  /// After a write through the unsharded parameter: both hold the same values again.
  void mark_written();

  /// Throws StateError if the unsharded parameter no longer is what `attach` made of it.
  void check_unsharded() const;
  /// A sharded parameter whose storage or sizes were replaced (torch::load, set_data): its values go back
  /// to `piece`. Accepts this rank's rows or the whole parameter; throws StateError otherwise.
  void reset_sharded_param(const at::Tensor& piece);

  /// Both identities go on as the same tensors, with other dtypes, on `piece`'s and `unsharded_device`
  /// (param_conversion.cpp).
  /// piece: this rank's rows in `dtype`, already there. gradient: of the sharded parameter, undefined
  /// if it has none. The unsharded parameter is released. Values and gradients on the old memory are gone.
  void convert(at::ScalarType dtype, at::ScalarType param_dtype, const at::Tensor& piece,
               const std::shared_ptr<ParamOwner>& owner, c10::Device unsharded_device);
  /// The unsharded parameter goes on as the same tensor in another dtype, released; its gradient follows.
  void set_param_dtype(at::ScalarType param_dtype, const std::shared_ptr<ParamOwner>& owner,
                       c10::Device unsharded_device);

  /// Takes what changed since the last call over to the other side; the sharded one wins (T12). Returns whether
  /// anything changed.
  bool sync_requires_grad();
  /// It would change something.
  bool has_new_requires_grad() const;
  bool requires_grad() const { return requires_grad_; }

  /// What the user has set on the parameter before it was sharded, or on either side since.
  const GradDtype& grad_dtype() const { return grad_dtype_; }
  /// Looks whether it has changed, as `sync_requires_grad` does; the sharded one wins. Returns that.
  bool sync_grad_dtype();
  /// In which dtype autograd leaves gradients on the unsharded parameter; nothing before it is one.
  void set_unsharded_grad_dtype(const GradDtype& value);

 private:
  int64_t current_version() const;
  void point_unsharded_at(const at::Tensor& unsharded_param, c10::Storage storage) const;
  void keep_unsharded_alive(const at::Tensor& sharded_param);
  at::Tensor view_of(const at::Tensor& piece) const;

  std::string name_;
  ShardLayout layout_;
  int rank_;
  at::ScalarType dtype_, param_dtype_;
  int64_t itemsize_;
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> unsharded_param_;
  UnshardedStorage* storage_ = nullptr;
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> sharded_param_;
  c10::TensorImpl* sharded_impl_ = nullptr;
  at::Tensor initial_sharded_;
  int64_t seen_version_ = 0;
  bool requires_grad_ = false;
  GradDtype grad_dtype_, unsharded_grad_dtype_;  // the user's; what the unsharded parameter has, by us or by the user
  bool has_moved_away_ = false;
  const c10::StorageImpl* expected_storage_ = nullptr;  // the storage the sharded parameter should have
  size_t index_ = 0;
  OwnerLink owner_;
};

}  // namespace fsdp
