#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "dispatch/param_storage.hpp"
#include "param/param_spec.hpp"

namespace fsdp {

/// Whose parameter a tensor is: number `index` of the group that `link` leads to.
struct ParamRef {
  OwnerLink link = {};
  size_t index = 0;
};

/// The tensor of a parameter that the module's member holds and `forward` reads: full shape, in the dtype that is computed
/// in. It stays the same tensor for good; its storage shows the group's memory while the group is unsharded.
///
/// Does not keep the tensor alive: the sharded tensor does (UnshardedKeeper). Not thread-safe: its group's lock guards it.
class UnshardedTensor {
 public:
  explicit UnshardedTensor(const at::Tensor& tensor) : tensor_(tensor.getIntrusivePtr()) {}

  at::Tensor tensor() const;  ///< undefined once the module is gone
  /// Returns the tensor for a look, without a reference; null once the module is gone.
  c10::TensorImpl* peek() const { return tensor_.expired() ? nullptr : tensor_._unsafe_get_target(); }
  /// Returns its managed storage; null before `attach`, and once nobody can use the tensor or a view of it.
  UnshardedStorage* storage() const { return storage_; }
  void storage_gone() { storage_ = nullptr; }

  /// Gives the tensor its managed storage, released, and the residency key.
  void attach(const ParamSpec& spec, const std::shared_ptr<ParamOwner>& owner, const ParamRef& place, c10::Device device);
  /// Retires the storage, which stays empty and says why. True: the tensor is still there, and wants another one.
  bool retire(const std::string& name);
  /// Gives the tensor another storage, which shows what this one does. What else shows this one has `values`, which it keeps.
  void leave_to_aliases(const at::Tensor& values, const ParamSpec& spec, const std::shared_ptr<ParamOwner>& owner,
                        const ParamRef& place);
  /// Forgets the tensor, which another group has from now on.
  void move_away(const std::string& name);

  /// Makes it an ordinary tensor that shares `whole`'s memory, dtype and device, for a while: no operator on it is looked
  /// at. Returns the managed storage, for `restore`. `whole` has the parameter's sizes.
  c10::Storage set_aside(const at::Tensor& whole);
  /// Makes it again what `attach` made of it; nothing to do once the module is gone.
  void restore(const ParamSpec& spec, c10::Storage storage);

  /// Throws StateError if it no longer is what `attach` made of it.
  void check(const std::string& name) const;
  /// Moves the tensor's version, so that autograd refuses a backward through what it showed before.
  void bump_version() const;

 private:
  void point_at(const ParamSpec& spec, const at::Tensor& tensor, c10::Storage storage) const;

  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor_;
  UnshardedStorage* storage_ = nullptr;
};

}  // namespace fsdp
