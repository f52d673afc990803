#include "param/left_storage.hpp"

#include <fmt/format.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <unordered_map>
#include <utility>

#include "dispatch/param_storage.hpp"

namespace fsdp {

namespace {

// Its address marks what has been left; it never allocates.
class LeftMark final : public c10::Allocator {
 public:
  at::DataPtr allocate(size_t) override {
    TORCH_CHECK(false, "fsdp: the memory that a sharded parameter had before fully_shard cannot be resized");
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

LeftMark& left_mark() {
  static LeftMark mark;
  return mark;
}

}  // namespace

void LeftStorages::note(const at::Tensor& unsharded_param, size_t index, Closes closes) {
  if (unsharded_param.is_meta() || !unsharded_param.has_storage() || unsharded_param.nbytes() == 0) return;
  if (ParamStorage::of(unsharded_param.unsafeGetTensorImpl()) != nullptr) return;  // another group's, which says so itself
  const auto& storage = unsharded_param.storage();
  const bool is_larger = storage.nbytes() > unsharded_param.nbytes();
  if (!is_larger && closes == Closes::kNever) return;
  for (auto& known : left_)
    if (known.storage._unsafe_get_target() == storage.unsafeGetStorageImpl()) return known.params.push_back(index);
  left_.push_back({.storage = storage.getWeakStorageImpl(),
                   .bytes = static_cast<int64_t>(storage.nbytes()),
                   .params = {index},
                   .is_larger = is_larger,
                   .has_graph = static_cast<bool>(torch::autograd::impl::try_get_grad_accumulator(unsharded_param))});
}

void LeftStorages::mark(const Left& left, const std::string& name, Reads reads) {
  const auto storage = left.storage.lock();
  if (!storage) return;
  auto text = fmt::format(
      "fsdp: this tensor shows the memory that parameter '{}' had before fully_shard: it is a view of it, an alias (detach, "
      "data, set_data), or was saved by autograd. The parameter has other memory now, so the two would part. Make the tensor "
      "anew "
      "from the parameter, or run forward again; or give it memory of its own (clone) before fully_shard",
      name);
  storage->set_allocator(&left_mark());
  if (reads == Reads::kAreAllowed)
    storage->get_extra_meta().custom_data_ptr_error_msg_ = std::move(text);
  else
    storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(text));  // despite its name it frees nothing
}

void LeftStorages::forget_unused() {
  std::erase_if(left_, [](const Left& left) { return left.storage.expired(); });
}

void LeftStorages::note_kept(const at::Tensor& piece, size_t index) {
  left_.push_back({.storage = piece.storage().getWeakStorageImpl(),
                   .bytes = static_cast<int64_t>(piece.storage().nbytes()),
                   .params = {index},
                   .is_larger = piece.storage().nbytes() > piece.nbytes(),
                   .has_graph = true});
}

void LeftStorages::hand_over(size_t index, LeftStorages& to, size_t index_there) {
  for (auto& left : left_) {
    if (std::erase(left.params, index) == 0) continue;
    to.left_.push_back(left);
    to.left_.back().params = {index_there};
  }
  std::erase_if(left_, [](const Left& left) { return left.params.empty(); });
}

std::vector<LeftStorages::Left> LeftStorages::take_used() {
  forget_unused();
  return std::exchange(left_, {});
}

namespace {

/// The bytes of its storage that a tensor lies in.
struct Stretch {
  int64_t begin = 0, end = 0;
};
Stretch stretch_of(const at::Tensor& tensor) {
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const auto itemsize = static_cast<int64_t>(tensor.element_size());
  return {tensor.storage_offset() * itemsize, (last + 1) * itemsize};
}

bool has_memory(const at::Tensor& tensor) { return !tensor.is_meta() && tensor.has_storage() && tensor.numel() > 0; }

/// Knows the parameters that go on in the memory that they had, of all models of the process: storages of several models have
/// addresses of their own.
class KeptMemory {
 public:
  void note(const at::Tensor& param, const at::Tensor& piece, const std::string& name) {
    std::lock_guard lock(mutex_);
    if (kept_.size() >= forget_at_) {
      std::erase_if(kept_, [](const auto& entry) { return entry.second.piece.expired(); });
      forget_at_ = 2 * kept_.size() + 64;
    }
    kept_.emplace(param.storage().unsafeGetStorageImpl(), Kept{WeakTensor(piece.getIntrusivePtr()), name, stretch_of(param)});
  }
  /// but: a piece that does not count.
  std::string keeper_of(const at::Tensor& tensor, const c10::TensorImpl* but) {
    const auto own = stretch_of(tensor);
    std::lock_guard lock(mutex_);
    const auto [begin, end] = kept_.equal_range(tensor.storage().unsafeGetStorageImpl());
    for (auto entry = begin; entry != end; ++entry) {
      const auto& [piece, name, stretch] = entry->second;
      const bool counts = !piece.expired() && piece._unsafe_get_target() != but;
      if (counts && own.begin < stretch.end && stretch.begin < own.end) return name;
    }
    return {};
  }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Kept {
    WeakTensor piece;  // as long as it is there, no other storage has this one's address
    std::string name;
    Stretch stretch;
  };
  std::mutex mutex_;
  std::unordered_multimap<const c10::StorageImpl*, Kept> kept_;
  size_t forget_at_ = 64;
};

KeptMemory& kept_memory() {
  static KeptMemory memory;
  return memory;
}

}  // namespace

void note_kept_memory(const at::Tensor& param, const at::Tensor& piece, const std::string& name) {
  if (has_memory(param)) kept_memory().note(param, piece, name);
}

bool is_kept_by_another(const at::Tensor& piece) {
  return has_memory(piece) && !kept_memory().keeper_of(piece, piece.unsafeGetTensorImpl()).empty();
}

std::string keeper_of_memory(const at::Tensor& tensor) {
  return has_memory(tensor) ? kept_memory().keeper_of(tensor, /*but=*/nullptr) : std::string();
}

const std::string* said_of_left_memory(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return nullptr;
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (storage->allocator() != &left_mark()) return nullptr;
  const auto& text = storage->get_extra_meta().custom_data_ptr_error_msg_;
  return text ? &*text : nullptr;
}

}  // namespace fsdp
