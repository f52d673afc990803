#include "dispatch/residency.hpp"

#include "dispatch/residency_fallback.hpp"

namespace fsdp {

namespace {

// key_set_ is protected: a derived class may name it.
struct TensorKeys : c10::TensorImpl {
  static c10::DispatchKeySet& of(c10::TensorImpl* impl) { return impl->*&TensorKeys::key_set_; }
};

}  // namespace

void add_inner_residency_key(const at::Tensor& alias) {
  make_inner_fallback_known();
  auto& keys = TensorKeys::of(alias.unsafeGetTensorImpl());
  keys = keys.add(kInnerResidencyKey);
}

void add_residency_key(const at::Tensor& tensor) {
  auto& keys = TensorKeys::of(tensor.unsafeGetTensorImpl());
  keys = keys.add(kResidencyKey);
}

void remove_residency_key(const at::Tensor& tensor) {
  auto& keys = TensorKeys::of(tensor.unsafeGetTensorImpl());
  keys = keys.remove(kResidencyKey);
}

}  // namespace fsdp
