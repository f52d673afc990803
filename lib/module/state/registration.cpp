#include "module/state/registration.hpp"

#include "module/module_access.hpp"

namespace fsdp {

Registration registration_at(torch::nn::Module& module, size_t slot) {
  auto alive = module.weak_from_this();
  const bool is_shared = !alive.expired();
  return {&module, std::move(alive), is_shared, ModuleAccess::parameters(module)[slot].key(), slot, /*param=*/0};
}

const at::Tensor* tensor_at(const Registration& entry) {
  const auto& table = ModuleAccess::parameters(static_cast<const torch::nn::Module&>(*entry.module));
  return entry.slot < table.size() ? &table[entry.slot].value() : nullptr;
}

}  // namespace fsdp
