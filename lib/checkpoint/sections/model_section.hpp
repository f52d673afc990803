#pragma once

#include <vector>

#include "api/state_dict/named_states.hpp"
#include "fsdp/checkpoint_parts.hpp"

namespace fsdp {

/// `local`, of this rank, spread like a parameter; whole where there is none.
CheckpointTensor spread_like(const std::optional<FoundParam>& param, std::string name, at::Tensor local);

/// Parameters and buffers under their first names. dtype: that floating-point ones have in the file; none: their own.
CheckpointSection model_section(const std::vector<NamedState>& states, std::optional<at::ScalarType> dtype);

}  // namespace fsdp
