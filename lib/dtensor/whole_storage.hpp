#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include "dtensor/partial_scalar.hpp"
#include "tensor/dtensor_spec.hpp"

namespace fsdp {

/// What a DTensor is made of.
struct DTensorValue {
  DTensorSpec::Ptr spec = {};
  at::Tensor local = {};           ///< this rank's piece, an ordinary tensor; undefined while `partial` waits
  PartialScalar::Ptr partial = {};  ///< of a 0-dim tensor, replicated once it has been read

  /// The whole, with the spec's strides; may share memory with `local`. operation: that needs it, for the collective's name.
  /// A collective call, unless it is replicated.
  at::Tensor whole(std::string_view operation) const;
  /// The same in memory of its own that lies exactly as the spec says.
  at::Tensor own_whole(std::string_view operation) const;
};

/// Storage of a DTensor and its views: as many bytes as the whole has and none that can be read, but what is needed to gather
/// them. It is there because autograd asks every gradient's storage how many tensors share it; and it says that it is on the
/// meta device, so that torch::save, before it reads the bytes, calls `set_(Storage)`, where they are gathered.
class WholeStorage final : public c10::StorageImpl {
 public:
  /// With a message: whoever asks for the memory learns what to call instead. Temporaries of operators do without.
  enum class Message { kNone, kFull };
  WholeStorage(DTensorValue value, Message message);

  const DTensorValue& value() const { return value_; }
  /// After the spec got another name: what the message says.
  void renamed();
  /// With the last strong reference: a weak one keeps the object, but must not keep the piece.
  void release_resources() override;
  static const WholeStorage* of(const c10::StorageImpl* storage) {
    return storage != nullptr && typeid(*storage) == typeid(WholeStorage) ? static_cast<const WholeStorage*>(storage) : nullptr;
  }

 private:
  DTensorValue value_;
  Message message_;
};

}  // namespace fsdp
