#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace fsdp {

class GroupPort;

/// torch::autograd::grad over parameters: what autograd hands out for parameter `index` instead of accumulating it is the mean
/// of the ranks' gradients, as a DTensor, by a collective of its own. With create_graph it is whole and has a history: its
/// backward passes each rank's gradient on, and the mean is taken when that arrives. Only where the parameter is a DTensor. A
/// hook of autograd does it, which a user's first hook on the tensor removes: so it comes with each call of grad.
void install_capture_hook(const at::Tensor& unsharded_param, std::shared_ptr<GroupPort> port, size_t index);

}  // namespace fsdp
