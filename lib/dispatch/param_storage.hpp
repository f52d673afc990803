#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <memory>
#include <string>

#include "dispatch/param_owner.hpp"

namespace fsdp {

/// A group's address, shared by all who must notice that the group is gone: it is null then.
using OwnerLink = std::shared_ptr<ParamOwner*>;

/// Storage of a tensor that carries the residency key. Which of the two kinds it is, and whose, is
/// what the dispatcher fallback asks.
class ParamStorage : public c10::StorageImpl {
 public:
  enum class Kind { kUnsharded, kSharded };

  Kind kind() const { return kind_; }
  size_t index() const { return index_; }
  /// Null once a sharded parameter has outlived its group.
  ParamOwner* owner() const { return *owner_; }
  /// Its tensors are nobody's from now on.
  void leave_owner() { owner_ = std::make_shared<ParamOwner*>(nullptr); }

  /// `tensor`'s storage if it is one of ours, else null. Cheap: compares the allocator's address.
  static ParamStorage* of(const c10::TensorImpl* tensor);

 protected:
  ParamStorage(Kind kind, OwnerLink owner, size_t index, int64_t bytes, at::DataPtr data);

 private:
  OwnerLink owner_;
  Kind kind_;
  size_t index_;
};

/// Storage behind one unsharded parameter. It owns no memory: while its group is unsharded it points
/// into the group's buffer; while it is not, every access throws an error with the parameter's name.
/// Sizes, bytes and device stay what they are throughout, and refilling moves no version counter.
///
/// It keeps its group alive: a view that autograd saved can always ask for its data.
class UnshardedStorage final : public ParamStorage {
 public:
  UnshardedStorage(std::shared_ptr<ParamOwner> owner, OwnerLink link, size_t index, int64_t bytes,
                c10::Device device, const std::string& name);
  ~UnshardedStorage() override {
    if (!is_retired_) owner()->unsharded_storage_gone(index());
  }

  /// Sets the name that errors show.
  void set_name(const std::string& name);
  /// Points into memory that the group keeps alive.
  void fill(void* data);
  void release();
  /// The unsharded parameter gets another storage: this one, behind older views of it, stays empty and says why.
  void retire(const std::string& name);
  /// As `retire`, but older views are ordinary tensors from now on, which show `values`: laid out as the unsharded parameter
  /// is.
  void leave_to_aliases(const at::Tensor& values);
  /// Null: it is released.
  void* shown() const { return is_filled_ ? const_cast<void*>(data()) : nullptr; }

  /// True while the unsharded parameter shows other memory than this: see UnshardedTensor::set_aside.
  bool is_set_aside() const { return is_set_aside_; }
  void set_aside(bool value) { is_set_aside_ = value; }

 private:
  std::shared_ptr<ParamOwner> keep_alive_;
  bool is_filled_ = false;
  bool is_retired_ = false;
  bool is_set_aside_ = false;
};

/// Storage behind one sharded parameter: a piece of the group's local shard, which it keeps alive.
class ShardStorage final : public ParamStorage {
 public:
  ShardStorage(OwnerLink owner, size_t index, int64_t bytes, void* data, c10::Storage memory,
                    c10::Device device);
  /// The sharded parameter has another storage now than `before`. What else shows that one (`backup = parameter.data`) keeps
  /// the values of now, in memory of its own, and is an ordinary tensor. Nothing for any other storage.
  static void leave_to_aliases(const c10::Storage& before);
};

}  // namespace fsdp
