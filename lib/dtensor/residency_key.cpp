#include "dtensor/residency_key.hpp"

namespace fsdp {

namespace {

// key_set_ is protected: a derived class may name it.
struct TensorKeys : c10::TensorImpl {
  static c10::DispatchKeySet& of(c10::TensorImpl* impl) { return impl->*&TensorKeys::key_set_; }
};

}  // namespace

void add_key(const at::Tensor& tensor, c10::DispatchKey key) {
  auto& keys = TensorKeys::of(tensor.unsafeGetTensorImpl());
  keys = keys.add(key);
}

void remove_residency_key(const at::Tensor& tensor) {
  auto& keys = TensorKeys::of(tensor.unsafeGetTensorImpl());
  keys = keys.remove(kResidencyKey);
}

}  // namespace fsdp
