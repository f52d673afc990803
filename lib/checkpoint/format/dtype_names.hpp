#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <string_view>

namespace fsdp {

/// What safetensors calls a dtype: "F32", "BF16", "I64"... Throws UsageError for one that it does not have.
std::string safetensors_dtype(at::ScalarType dtype);
/// nullopt for a name that is none of them.
std::optional<at::ScalarType> dtype_of_safetensors(std::string_view name);

}  // namespace fsdp
