#include "dispatch/param_storage.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

namespace fsdp {

namespace {

// Its address marks our storages; it never allocates.
class NoAllocator final : public c10::Allocator {
 public:
  at::DataPtr allocate(size_t) override {
    TORCH_CHECK(false, "fsdp: the storage of a sharded parameter cannot be resized");
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

NoAllocator& marker() {
  static NoAllocator allocator;
  return allocator;
}

// StorageImpl has the flag that makes data access throw, but no public way back to false before
// 2.15. Access rules do not apply to the arguments of an explicit instantiation: standard C++.
template <auto Member>
struct ThrowFlag {
  friend bool& throw_flag(c10::StorageImpl& storage) { return storage.*Member; }
};
bool& throw_flag(c10::StorageImpl& storage);
template struct ThrowFlag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

void delete_nothing(void*) {}

}  // namespace

ParamStorage::ParamStorage(Kind kind, OwnerLink owner, size_t index, int64_t bytes,
                           at::DataPtr data)
    : c10::StorageImpl(c10::StorageImpl::use_byte_size_t(), bytes, std::move(data), &marker(),
                       /*resizable=*/false),
      owner_(std::move(owner)),
      kind_(kind),
      index_(index) {}

ParamStorage* ParamStorage::of(const c10::TensorImpl* tensor) {
  if (!tensor->has_storage()) return nullptr;
  auto* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  return storage->allocator() == &marker() ? static_cast<ParamStorage*>(storage) : nullptr;
}

UnshardedStorage::UnshardedStorage(std::shared_ptr<ParamOwner> owner, OwnerLink link, size_t index,
                             int64_t bytes, c10::Device device, const std::string& name)
    : ParamStorage(Kind::kUnsharded, std::move(link), index, bytes, at::DataPtr(nullptr, device)),
      keep_alive_(std::move(owner)) {
  set_name(name);
  release();
}

void UnshardedStorage::set_name(const std::string& name) {
  // Despite its name this frees nothing: it sets the message and the flag.
  release_data_and_set_meta_custom_data_ptr_error_msg_(fmt::format(
      "fsdp: parameter '{}' is sharded and its storage is released. Operators gather it by themselves; for code that reads its "
      "memory directly (data_ptr, an accessor, torch::save of this tensor alone, is_alias_of) there are "
      "fsdp::full_tensor(parameter), for all of it, and fsdp::to_local(fsdp::sharded(parameter)), for this rank's part, or "
      "unshard() on its module before",
      name));
  if (is_filled_) throw_flag(*this) = false;
}

// In both, the flag comes first: setting the pointer is what refreshes the derived check.
void UnshardedStorage::fill(void* data) {
  is_filled_ = true;
  throw_flag(*this) = false;
  set_data_ptr_noswap(at::DataPtr(data, nullptr, &delete_nothing, device()));
}

void UnshardedStorage::release() {
  is_filled_ = false;
  // An empty tensor has nothing to read, and kernels may still ask for its pointer.
  throw_flag(*this) = nbytes() > 0;
  set_data_ptr_noswap(at::DataPtr(nullptr, device()));
}

void UnshardedStorage::retire(const std::string& name) {
  is_retired_ = true;
  release_data_and_set_meta_custom_data_ptr_error_msg_(fmt::format(
      "fsdp: this is a view, or was saved by autograd, of parameter '{}' as it was before it got "
      "another dtype or device (by fsdp::to, or by train() or eval() with full_precision_in_eval) or another "
      "group; run forward again",
      name));
  release();
}

void UnshardedStorage::leave_to_aliases(const at::Tensor& values) {
  is_retired_ = true;
  throw_flag(*this) = false;
  set_data_ptr_noswap(std::move(values.storage().unsafeGetStorageImpl()->mutable_data_ptr()));
  set_allocator(nullptr);  // it is nobody's
  leave_owner();
  keep_alive_ = nullptr;
}

ShardStorage::ShardStorage(OwnerLink owner, size_t index, int64_t bytes, void* data,
                                     c10::Storage memory, c10::Device device)
    : ParamStorage(Kind::kSharded, std::move(owner), index, bytes,
                   at::DataPtr(data, new c10::Storage(std::move(memory)),
                               [](void* kept) { delete static_cast<c10::Storage*>(kept); },
                               device)) {}

void ShardStorage::leave_to_aliases(const c10::Storage& before) {
  auto* storage = dynamic_cast<ShardStorage*>(before.unsafeGetStorageImpl());
  if (storage == nullptr || before.use_count() == 1) return;
  storage->leave_owner();
  if (storage->nbytes() == 0 || storage->mutable_data() == nullptr) return;
  const auto options = at::TensorOptions(at::kByte).device(storage->device());
  const auto kept = at::from_blob(storage->mutable_data(), {static_cast<int64_t>(storage->nbytes())}, options).clone();
  storage->set_data_ptr_noswap(std::move(kept.storage().unsafeGetStorageImpl()->mutable_data_ptr()));
}

}  // namespace fsdp
