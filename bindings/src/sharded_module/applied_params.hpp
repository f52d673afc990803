#pragma once

#include "group/param_group.hpp"
#include "shown/shown_params.hpp"

namespace fsdp::python {

using Groups = std::vector<std::shared_ptr<ParamGroup>>;

// Others put tensors where a module shows its sharded parameters: `nn.Module._apply` (to, to_empty, float...),
// load_state_dict, users. These are other DTensors, or the same over other memory, of another device or dtype. With these
// functions the core follows.
//
// Values go to the groups' own memory. What showed that memory before (a DTensor whose place another has taken, a state dict)
// keeps its values, in memory of its own: so parameters may be exchanged.

/// Takes over what the user has set on the parameters and their gradients, and sets the gradients aside. Call it before
/// `_apply`, which makes tensors without a grad_dtype, and other gradients; sharded parameters are shown then.
void prepare_apply(const ShownParams& params);

/// Whether all floating-point parameters of a group have to have the same new dtype, or those that have none follow the others:
/// `_apply` goes from module to module, and several may share a group.
enum class Changed { kTogether, kOneByOne };

/// Makes the groups follow `_apply` or load_state_dict, after it: they have the new values, device and dtype, and the DTensors
/// show their memory. Ties that hold different parameters are left as they are: they may be tied anew before a use. Throws
/// TypeError where no DTensor stands any more, ValueError for one of another form, StateError where only some of a group's
/// dtypes have changed; nothing has changed then.
void take_over_applied(const Groups& groups, const ShownParams& params, Changed changed = Changed::kTogether);

/// Does the same before a use, where users have put other parameters in the place of sharded ones, or `_apply` on a module
/// below has put other memory behind a DTensor; else does nothing. Throws StateError also where that leaves some of a group
/// without memory, and where a tie holds different parameters.
void take_over_changed(const Groups& groups, const ShownParams& params);
/// Does the same before later uses, but only where there are other parameters, and not within torch.func.functional_call.
/// These show as `form` then, which is how the others show.
void take_over_replaced(const Groups& groups, const ShownParams& params, Shows form);
/// This thread is within torch.func.functional_call, which puts other tensors in tables for the length of a call.
bool is_in_functional_call();

}  // namespace fsdp::python
