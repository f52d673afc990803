#include "param/stand_in.hpp"

#include "param/residency.hpp"

namespace fsdp {

void make_stand_in(const at::Tensor& tensor, c10::intrusive_ptr<StandIn> stand_in) {
  auto* impl = tensor.unsafeGetTensorImpl();
  stand_in->tensor_ = impl;
  impl->set_backend_meta(std::move(stand_in));
  add_residency_key(tensor);
}

c10::intrusive_ptr<StandIn> stand_in_of(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  if (!has_residency_key(impl) || !impl->key_set().has(c10::DispatchKey::Python)) return nullptr;
  const auto meta = impl->get_backend_meta_intrusive_ptr();
  auto* found = dynamic_cast<StandIn*>(meta.get());
  if (found == nullptr || found->tensor_ != impl) return nullptr;
  return c10::intrusive_ptr<StandIn>::reclaim_copy(found);
}

}  // namespace fsdp
