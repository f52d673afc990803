#include "dtensor/whole_storage.hpp"

#include <ATen/ATen.h>

#include <mutex>
#include <utility>

#include "base/raw_view.hpp"

namespace fsdp {

at::Tensor DTensorValue::whole(std::string_view operation) const {
  return partial ? partial->read() : gather(*spec, local, operation);
}

at::Tensor DTensorValue::own_whole(std::string_view operation) const {
  const auto values = whole(operation);
  return at::empty_strided(spec->sizes(), spec->strides(), values.options()).copy_(values);
}

namespace {

size_t bytes_of(const DTensorValue& value) {
  const auto dtype = value.partial ? value.partial->dtype() : value.local.scalar_type();
  return static_cast<size_t>(value.spec->numel()) * c10::elementSize(dtype);
}

}  // namespace

WholeStorage::WholeStorage(DTensorValue value, Message message, bool is_kept)
    : StorageImpl(use_byte_size_t(), bytes_of(value), c10::DataPtr(nullptr, at::kMeta), nullptr, /*resizable=*/false),
      value_(std::move(value)),
      message_(message),
      is_kept_(is_kept) {
  renamed();
}

void WholeStorage::renamed() {
  std::optional<std::string> text;
  if (message_ == Message::kFull) text = value_.spec->memory_error();
  // Despite its name this frees nothing: it sets the message and the flag.
  release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(text));
}

void WholeStorage::release_resources() {
  unlist();
  value_ = {};
  StorageImpl::release_resources();
}

void WholeStorage::empty() {
  auto local = std::exchange(value_.local, at::Tensor());
  if (local.use_count() != 1 || local.unsafeGetTensorImpl()->autograd_meta() != nullptr) return;
  if (!nothing_ || nothing_.device() != local.device())
    nothing_ = c10::Storage(c10::make_intrusive<c10::StorageImpl>(use_byte_size_t(), 0, at::DataPtr(nullptr, local.device()),
                                                                  nullptr, /*resizable=*/false));
  local.unsafeGetTensorImpl()->set_storage_keep_dtype(nothing_);
  spare_ = std::move(local);
}

at::Tensor KeptStorage::piece_on(const at::Tensor& base, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset) {
  auto* kept = WholeStorage::of(storage_.unsafeGetStorageImpl());
  auto piece = kept != nullptr ? kept->take_spare() : at::Tensor();
  if (!piece.defined() || piece.key_set() != base.key_set() || piece.dtype() != base.dtype() || piece.device() != base.device() ||
      piece.sizes() != sizes || piece.strides() != strides)
    return raw_view(base, sizes, strides, offset);
  piece.unsafeGetTensorImpl()->set_storage_keep_dtype(base.storage());
  piece.unsafeGetTensorImpl()->set_storage_offset(offset);
  return piece;
}

c10::Storage KeptStorage::fill(const DTensorValue& value) {
  auto* kept = WholeStorage::of(storage_.unsafeGetStorageImpl());
  // What somebody has taken from a tensor, by storage(), shows that tensor's values for as long as he has it.
  if (kept != nullptr && storage_.use_count() == 1 && kept->value().spec == value.spec && kept->nbytes() == bytes_of(value)) {
    kept->refill(value.local);
    return storage_;
  }
  return storage_ = c10::Storage(c10::make_intrusive<WholeStorage>(value, WholeStorage::Message::kFull, /*is_kept=*/true));
}

void StorageHold::set(c10::Storage storage) {
  // The third reference is the KeptStorage's. Two tensors that go on two threads may each see the other: then the piece goes when
  // the storage is filled again.
  if (auto* held = WholeStorage::of(storage_.unsafeGetStorageImpl()); held != nullptr && held->is_kept() && storage_.use_count() == 3)
    held->empty();
  storage_ = std::move(storage);
}

namespace {

// Of all ranks that are threads of this process.
std::mutex& listing_mutex() {
  static std::mutex mutex;
  return mutex;
}
std::list<WholeStorage*>& listing() {
  static auto* listing = new std::list<WholeStorage*>;  // storages may outlive statics
  return *listing;
}

}  // namespace

void WholeStorage::list() {
  if (place_) return;
  std::lock_guard lock(listing_mutex());
  place_ = listing().insert(listing().end(), this);
}

void WholeStorage::unlist() {
  if (!place_) return;
  std::lock_guard lock(listing_mutex());
  listing().erase(*std::exchange(place_, std::nullopt));
}

std::vector<WholeStorage::Listed> WholeStorage::listed(const std::function<bool(const DTensorSpec&)>& is_wanted) {
  std::lock_guard lock(listing_mutex());
  std::vector<Listed> found;
  for (const auto* storage : listing())
    if (storage->value_.local.defined() && is_wanted(*storage->value_.spec)) found.push_back({storage, storage->value_});
  return found;
}

}  // namespace fsdp
