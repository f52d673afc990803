#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <optional>
#include <utility>

#include "base/recycled_memory.hpp"
#include "dtensor/residency_key.hpp"
#include "dtensor/whole_storage.hpp"

namespace fsdp {

/// The tensor that a DTensor is: the whole's sizes and strides, under the residency key, around this rank's piece. A view that
/// keeps every cut dimension as it is holds a view of the piece. Any other view is a *window*: it has no piece, but names the
/// tensor whose elements it shows (`base`), by sizes, strides and offset.
///
/// It has the piece's version counter, so that writes to either show on both. Which kind a view is follows from what is the
/// same on all ranks: one that decided by its own piece would take another branch than the others, and collectives would cross.
class DTensorImpl final : public c10::TensorImpl, public RecycledMemory<DTensorImpl> {
 public:
  /// storage: a WholeStorage of this value.
  DTensorImpl(DTensorValue&& value, c10::Storage storage);
  /// How a view lies in the memory of the whole.
  struct Geometry {
    c10::IntArrayRef sizes, strides;
    int64_t offset;
  };
  /// A view of `viewed` that shows elements of `base`. value: without a piece it is a window.
  DTensorImpl(const DTensorImpl& viewed, at::Tensor base, DTensorValue value, const Geometry& geometry);

  /// Returns the DTensor behind `impl`; null for any other tensor. Keys are copied along with metadata
  /// (`plain.set_data(dtensor)`), so they alone prove nothing.
  static DTensorImpl* of(const c10::TensorImpl* impl) {
    return has_residency_key(impl) && typeid(*impl) == typeid(DTensorImpl)
               ? static_cast<DTensorImpl*>(const_cast<c10::TensorImpl*>(impl))
               : nullptr;
  }
  static DTensorImpl* of(const at::Tensor& tensor) { return of(tensor.unsafeGetTensorImpl()); }

  const DTensorValue& value() const { return value_; }
  const DTensorSpec& spec() const { return *value_.spec; }
  const at::Tensor& local() const { return value_.local; }
  bool is_window() const { return !value_.local.defined() && !value_.partial; }
  /// Returns, for a view, the tensor whose elements it shows. Undefined: it is none.
  const at::Tensor& base() const { return base_; }
  /// True if every rank has its piece, cut by placements, and no piece is a summand.
  bool has_piece() const { return value_.local.defined() && !value_.spec->has_partial(); }

  /// Returns the whole as an ordinary tensor of this tensor's sizes, outside autograd; may share memory with the piece. A
  /// collective call.
  at::Tensor whole(std::string_view operation) const;
  /// Makes the piece ready, before somebody works with it. What waits is read, and replicated from then on. `data()`, which
  /// counts its writes by itself, has the other tensor's piece until then.
  void settle();

  /// Puts a parameter's DTensor around this piece from now on, with its dtype and device. The memory is a group's: what is set
  /// (set_data, torch::load) is written to it.
  void follow(at::Tensor local, DTensorSpec::Ptr spec);
  /// True for such a parameter.
  bool keeps_memory() const { return keeps_memory_; }
  /// Takes over the new name, after the spec got another one.
  void renamed() { static_cast<WholeStorage*>(storage_.unsafeGetStorageImpl())->renamed(); }

  /// False, so that `contiguous()` is dispatched and gives an ordinary tensor: what printing and readers of memory go through.
  c10::SymBool sym_is_contiguous_custom(at::MemoryFormat) const override { return false; }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version, bool may_change) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version, bool may_change) const override;
  /// Lets go of what it is made of, with the last strong reference: a weak one keeps the object, but must not keep that.
  void release_resources() override;
  /// Implements set_data: takes a DTensor as it is placed; of an ordinary tensor of the whole's sizes, takes this rank's part.
  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& from) override;

 private:
  template <class Version>
  c10::intrusive_ptr<TensorImpl> copied(Version&& version, bool may_change) const;
  void take(const DTensorImpl& other);
  void hold(c10::Storage storage);
  void write(const at::Tensor& from);
  /// `local` becomes its piece: the same memory, which counts versions as this tensor does from then on.
  void count_here(const at::Tensor& local);

  StorageHold hold_;  // goes before `storage_` and behind the piece
  DTensorValue value_;
  at::Tensor base_;
  bool keeps_memory_ = false;
  bool counts_apart_ = false;  // and its piece does not yet
};

/// Makes the result of an operator on pieces: placed by `spec`, whose local sizes `local` has.
at::Tensor make_dtensor(at::Tensor local, DTensorSpec::Ptr spec, WholeStorage::Message message = WholeStorage::Message::kNone);
/// Makes a DTensor that may stay: it has the full message and is listed for saves.
at::Tensor make_copy(at::Tensor local, DTensorSpec::Ptr spec);
/// Makes a DTensor of this value. storage: of exactly this value.
at::Tensor make_dtensor(DTensorValue&& value, c10::Storage storage);
/// Makes a 0-dim DTensor that waits to be read.
at::Tensor make_dtensor(PartialScalar::Ptr scalar, DTensorSpec::Ptr spec);

/// Returns the whole of a DTensor, as DTensorImpl::whole does; any other tensor is returned as it is.
at::Tensor whole_of(const at::Tensor& tensor, std::string_view operation);

/// Gives an ordinary tensor its values, in place, if `set_data` gave it a DTensor's metadata and storage (LibTorch's
/// Module::clone() does): a collective call. Returns false for any other tensor.
bool become_ordinary(const at::Tensor& tensor);

}  // namespace fsdp
