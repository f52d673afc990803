#pragma once

#include "shown/shown_param.hpp"

namespace fsdp::python {

/// Hooks of the user's behind a gradient (`register_post_accumulate_grad_hook`). They are on the DTensor, which autograd does
/// not accumulate into, so it is these functions that call them.
bool has_gradient_hooks(const ShardedDTensor& param);
void run_gradient_hooks(const ShardedDTensor& param);

/// Makes the user's hooks run amid backward from now on, as soon as the core has put a gradient on the sharded parameter or
/// added to it.
void run_gradient_hooks_in_backward(ShownParam& param);

}  // namespace fsdp::python
