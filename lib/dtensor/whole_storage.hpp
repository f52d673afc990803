#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "dtensor/partial_scalar.hpp"
#include "tensor/dtensor_spec.hpp"

namespace fsdp {

/// What a DTensor is made of.
struct DTensorValue {
  DTensorSpec::Ptr spec = {};
  at::Tensor local = {};           ///< this rank's piece, an ordinary tensor; undefined while `partial` waits
  PartialScalar::Ptr partial = {};  ///< of a 0-dim tensor, replicated once it has been read

  /// Returns the whole, with the spec's strides; may share memory with `local`. operation: that needs it, for the collective's
  /// name. A collective call, unless it is replicated.
  at::Tensor whole(std::string_view operation) const;
  /// Returns the whole in memory of its own, which lies exactly as the spec says. A collective call like `whole`.
  at::Tensor own_whole(std::string_view operation) const;
};

/// Holds a storage from when its last DTensor has gone until the next one takes it: nobody else has it then. The last DTensor
/// may go on any thread; one thread at a time takes.
class StorageShelf {
 public:
  StorageShelf() = default;
  StorageShelf(const StorageShelf&) = delete;
  StorageShelf& operator=(const StorageShelf&) = delete;
  /// Takes the storage that lies there. Undefined: none does.
  c10::Storage take();
  /// Puts a storage there. If one lies there already, or nobody would take it, it goes.
  void put(c10::Storage storage);
  /// Lets go of what lies there: nobody takes any more.
  void close();

 private:
  std::atomic<c10::StorageImpl*> storage_ = nullptr;  // a reference
};

/// Storage of a DTensor and its views: as many bytes as the whole has and none that can be read, but what is needed to gather
/// them. It is there because autograd asks every gradient's storage how many tensors share it; and it says that it is on the
/// meta device, so that torch::save, before it reads the bytes, calls `set_(Storage)`, where they are gathered.
class WholeStorage final : public c10::StorageImpl {
 public:
  /// Says what whoever asks for the memory learns. With a message, it is what to call instead; temporaries of operators do
  /// without.
  enum class Message { kNone, kFull };
  WholeStorage(DTensorValue value, Message message, std::shared_ptr<StorageShelf> shelf = nullptr);
  ~WholeStorage() override { unlist(); }

  const DTensorValue& value() const { return value_; }
  /// Returns the shelf where it waits to be used again. Null: it is not used again.
  StorageShelf* shelf() const { return shelf_.get(); }
  /// Gives it another piece, when it is used again.
  void refill(at::Tensor local) { value_.local = std::move(local); }
  /// Lets go of the piece's memory, before the storage is put on the shelf.
  void empty();
  /// Returns the tensor that was the piece before `empty`, for the next one. Undefined: somebody has it still, or has changed
  /// it.
  at::Tensor take_spare() { return std::exchange(spare_, at::Tensor()); }
  /// Renews the message, after the spec got another name.
  void renamed();
  /// Lets go of the piece, with the last strong reference: a weak one keeps the object, but must not keep the piece.
  void release_resources() override;

  /// Lists a copy or a `*_like`, which may be an optimizer's state: from now on other ranks can ask this one for its piece,
  /// when they save in another order.
  void list();
  struct Listed {
    const WholeStorage* storage;  // may be gone
    DTensorValue value;
  };
  /// Returns the listed values that are wanted, in the order in which they were made. is_wanted: may read no names, as some may
  /// be of ranks on other threads.
  static std::vector<Listed> listed(const std::function<bool(const DTensorSpec&)>& is_wanted);
  static WholeStorage* of(const c10::StorageImpl* storage) {
    return storage != nullptr && typeid(*storage) == typeid(WholeStorage)
               ? static_cast<WholeStorage*>(const_cast<c10::StorageImpl*>(storage))
               : nullptr;
  }

 private:
  void unlist();

  DTensorValue value_;
  Message message_;
  std::shared_ptr<StorageShelf> shelf_;
  at::Tensor spare_;
  c10::Storage nothing_;  // without memory, where the spare is
  std::optional<std::list<WholeStorage*>::iterator> place_;
};

/// The storage of DTensors that are made one after another, all alike, with the full message: a parameter's gradients, one in
/// each step. To make a storage with its message is half of what a DTensor costs, and its piece costs as much as itself: both
/// are used again once nobody has them any more. What is in use is its users' alone: with the last of them it goes.
class KeptStorage {
 public:
  KeptStorage() = default;
  KeptStorage(const KeptStorage&) = delete;
  KeptStorage& operator=(const KeptStorage&) = delete;
  ~KeptStorage() { shelf_->close(); }
  /// Makes the piece of the next value, as raw_view does. The last piece is used again if it fits and nobody has it.
  at::Tensor piece_on(const at::Tensor& base, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset);
  /// Returns a storage of this value: the one from before, if nobody has it and the value is of the same spec and as many
  /// bytes; else a new one.
  c10::Storage fill(const DTensorValue& value);
  void forget() {
    shelf_->take();
    next_ = c10::Storage();
  }

 private:
  std::shared_ptr<StorageShelf> shelf_ = std::make_shared<StorageShelf>();
  c10::Storage next_;  // taken from the shelf already
};

/// A DTensor's second reference to its storage: autograd adds in place where a gradient's storage has but one. It goes before
/// the first, and the last one to go puts a storage on its shelf.
class StorageHold {
 public:
  StorageHold() = default;
  StorageHold(const StorageHold&) = delete;
  StorageHold& operator=(const StorageHold&) = delete;
  ~StorageHold() { set(c10::Storage()); }
  void set(c10::Storage storage);

 private:
  c10::Storage storage_;
};

}  // namespace fsdp
