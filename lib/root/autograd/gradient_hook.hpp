#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace fsdp {

class GroupPort;

/// Makes autograd tell the group when the gradient of `unsharded_param` (parameter `index`) has been
/// accumulated. A hook that is there already is kept and runs first.
void install_gradient_hook(const at::Tensor& unsharded_param, std::shared_ptr<GroupPort> port, size_t index);

/// True for an unsharded parameter, even while it is set aside and shows other memory.
bool has_gradient_hook(const at::Tensor& tensor);

}  // namespace fsdp
