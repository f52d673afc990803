#pragma once

#include "group/param_group.hpp"
#include "shown/shown_params.hpp"

namespace fsdp::python {

using Groups = std::vector<std::shared_ptr<ParamGroup>>;

// Others put tensors where a module shows its sharded parameters: `nn.Module._apply` (to, to_empty, float...),
// load_state_dict, users. These are other DTensors, or the same over other memory, of another device or dtype. With these
// functions the core follows.

/// Before `_apply`, with sharded parameters shown: it makes tensors without a grad_dtype, and other gradients, so what the user
/// has set is taken over.
void prepare_apply(const ShownParams& params);

/// After it: the groups have the new values, device and dtype, and the DTensors show their memory. Throws TypeError where
/// no DTensor stands any more; nothing has changed then.
void take_over_applied(const Groups& groups, const ShownParams& params);

/// The same where users have put other parameters in the place of sharded ones, which are shown; else nothing. Throws
/// StateError where that leaves some of a group without memory.
void take_over_replaced(const Groups& groups, const ShownParams& params);

}  // namespace fsdp::python
