#include "checkpoint/sections/model_section.hpp"

namespace fsdp {

CheckpointTensor spread_like(const std::optional<FoundParam>& param, std::string name, at::Tensor local) {
  CheckpointTensor tensor{.name = std::move(name), .local = std::move(local), .sizes = {}};
  tensor.is_sharded = param.has_value();
  tensor.sizes = param ? whole_sizes(*param).vec() : tensor.local.sizes().vec();
  if (param) tensor.ranges = ranges_of(*param);
  return tensor;
}

CheckpointSection model_section(const std::vector<NamedState>& states, std::optional<at::ScalarType> dtype) {
  CheckpointSection section{"model", {}};
  for (const auto& state : states) {
    auto tensor = spread_like(state.param, state.names.front(),
                              state.param ? plain_view(state.tensor) : state.tensor.detach());
    tensor.other_names.assign(state.names.begin() + 1, state.names.end());
    tensor.dtype = state.dtype_before_cast;
    if (dtype && at::isFloatingType(tensor.dtype.value_or(tensor.local.scalar_type()))) tensor.dtype = dtype;
    section.tensors.push_back(std::move(tensor));
  }
  return section;
}

}  // namespace fsdp
