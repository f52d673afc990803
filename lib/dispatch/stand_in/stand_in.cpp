#include "dispatch/stand_in/stand_in.hpp"

#include <atomic>
#include <typeinfo>

#include "dispatch/residency.hpp"

namespace fsdp {

namespace {

/// The class of nearly all of them. A dynamic_cast compares names where two libraries know a class, and costs more
/// than all else that an optimizer's operator on a stand-in costs.
std::atomic<const std::type_info*> usual_class{nullptr};

StandIn* as_stand_in(c10::BackendMeta* meta) {
  if (meta == nullptr) return nullptr;
  return &typeid(*meta) == usual_class.load(std::memory_order_relaxed) ? static_cast<StandIn*>(meta)
                                                                       : dynamic_cast<StandIn*>(meta);
}

}  // namespace

void make_stand_in(const at::Tensor& tensor, c10::intrusive_ptr<StandIn> stand_in) {
  auto* impl = tensor.unsafeGetTensorImpl();
  stand_in->set_tensor(impl);
  const std::type_info* none = nullptr;
  const StandIn& made = *stand_in;
  usual_class.compare_exchange_strong(none, &typeid(made), std::memory_order_relaxed);
  impl->set_backend_meta(std::move(stand_in));
  add_residency_key(tensor);
}

c10::intrusive_ptr<StandIn> stand_in_of(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (!has_residency_key(impl) || !impl->key_set().has(c10::DispatchKey::Python)) return nullptr;
  auto* found = as_stand_in(impl->get_backend_meta());
  if (found == nullptr || !found->is_of(impl)) return nullptr;
  return c10::intrusive_ptr<StandIn>::reclaim_copy(found);
}

}  // namespace fsdp
