#include "dtensor/whole_storage.hpp"

#include <ATen/ATen.h>

#include <mutex>
#include <utility>

#include "base/raw_view.hpp"
#include "tensor/full_tensor.hpp"

namespace fsdp {

at::Tensor DTensorValue::whole(std::string_view operation) const {
  return partial ? partial->read() : full_of(*spec, local, operation);
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

WholeStorage::WholeStorage(DTensorValue value, Message message, std::shared_ptr<StorageShelf> shelf)
    : StorageImpl(use_byte_size_t(), bytes_of(value), c10::DataPtr(nullptr, at::kMeta), nullptr, /*resizable=*/false),
      value_(std::move(value)),
      message_(message),
      shelf_(std::move(shelf)) {
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
  spare_.reset();
  StorageImpl::release_resources();
}

namespace {

/// What raw_view makes, and nobody else can come to: a tensor that a user had assigned may be of any kind.
bool is_plain_and_ours(const at::Tensor& local) {
  const auto* impl = local.unsafeGetTensorImpl();
  return local.use_count() == 1 && local.weak_use_count() == 1 && impl->pyobj_slot()->load_pyobj() == nullptr &&
         typeid(*impl) == typeid(c10::TensorImpl) && impl->autograd_meta() == nullptr && impl->allow_tensor_metadata_change();
}

}  // namespace

void WholeStorage::empty() {
  auto local = std::exchange(value_.local, at::Tensor());
  if (!local.defined() || !is_plain_and_ours(local)) return;
  if (!nothing_ || nothing_.device() != local.device()) nothing_ = empty_storage(local.device());
  local.unsafeGetTensorImpl()->set_storage_keep_dtype(nothing_);
  spare_ = std::move(local);
}

namespace {

/// The address of nothing else.
c10::StorageImpl* closed() {
  static char mark;
  return reinterpret_cast<c10::StorageImpl*>(&mark);
}

c10::Storage reclaim(c10::StorageImpl* storage) {
  if (storage == nullptr || storage == closed()) return {};
  return c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim(storage));
}

}  // namespace

c10::Storage StorageShelf::take() { return reclaim(storage_.exchange(nullptr)); }

void StorageShelf::put(c10::Storage storage) {
  c10::StorageImpl* none = nullptr;
  if (storage_.compare_exchange_strong(none, storage.unsafeGetStorageImpl())) storage.unsafeReleaseStorageImpl();
}

void StorageShelf::close() { reclaim(storage_.exchange(closed())); }

at::Tensor KeptStorage::piece_on(const at::Tensor& base, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset) {
  if (!next_) next_ = shelf_->take();
  auto* kept = WholeStorage::of(next_.unsafeGetStorageImpl());
  auto piece = kept != nullptr ? kept->take_spare() : at::Tensor();
  // A view or a detached tensor that somebody has shares the version counter.
  if (!piece.defined() || piece.key_set() != base.key_set() || piece.dtype() != base.dtype() ||
      piece.device() != base.device() || piece.sizes() != sizes || piece.strides() != strides ||
      !piece.unsafeGetTensorImpl()->unique_version())
    return raw_view(base, sizes, strides, offset);
  piece.unsafeGetTensorImpl()->set_storage_keep_dtype(base.storage());
  piece.unsafeGetTensorImpl()->set_storage_offset(offset);
  return piece;
}

c10::Storage KeptStorage::fill(const DTensorValue& value) {
  auto storage = next_ ? std::exchange(next_, c10::Storage()) : shelf_->take();
  auto* kept = WholeStorage::of(storage.unsafeGetStorageImpl());
  // The thread on which the last DTensor goes may be about to let go.
  if (kept != nullptr && storage.use_count() == 1 && kept->value().spec == value.spec && kept->nbytes() == bytes_of(value)) {
    kept->refill(value.local);
    return storage;
  }
  return c10::Storage(c10::make_intrusive<WholeStorage>(value, WholeStorage::Message::kFull, shelf_));
}

void StorageHold::set(c10::Storage storage) {
  // The other reference is the DTensor's own. Two that go on two threads may each see the other's: then it is not used again.
  if (auto* held = WholeStorage::of(storage_.unsafeGetStorageImpl());
      held != nullptr && held->shelf() != nullptr && storage_.use_count() == 2) {
    held->empty();
    held->shelf()->put(std::move(storage_));
  }
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
