#pragma once

#include "shown/shown_params.hpp"

namespace fsdp::python {

/// Finds parameters whose local tensors have got fsdp_pre_all_gather and fsdp_post_all_gather since they were sharded; from
/// then on these hooks gather them. Does nothing where such hooks are not looked for (ShownParams::find_hooked). Call it before
/// the first gather, as FSDP2 does, while sharded parameters are shown. Needs the interpreter's lock.
void take_late_hooks(const ShownParams& params);

}  // namespace fsdp::python
