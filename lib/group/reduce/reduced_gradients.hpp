#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp {

/// True if a user's hooks wait for the gradient of a registered parameter: tensor hooks or post-accumulate ones.
bool has_user_hooks(const at::Tensor& registered);

}  // namespace fsdp
