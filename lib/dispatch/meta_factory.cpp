#include "dispatch/meta_factory.hpp"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include "dispatch/residency.hpp"

namespace fsdp {

bool takes_tensors(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments())
    if (argument.type()->isSubtypeOf(*c10::OptionalType::ofTensor()) ||
        argument.type()->isSubtypeOf(*c10::ListType::ofTensors()))
      return true;
  return false;
}

void place_on_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (!c10::impl::tls_is_dispatch_key_included(kResidencyKey)) [[likely]]
    return;
  const auto& schema = op.schema();
  const auto position = schema.argumentIndexWithName("device");
  if (!position || takes_tensors(schema)) return;
  auto& device =
      (*stack)[stack->size() - schema.arguments().size() + static_cast<size_t>(*position)];
  if (device.isNone()) device = c10::Device(at::kMeta);
}

}  // namespace fsdp
