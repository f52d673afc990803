#pragma once

#include "shown/shown_params.hpp"

namespace fsdp::python {

/// Before the first gather, as in FSDP2: parameters whose local tensors have got fsdp_pre_all_gather and
/// fsdp_post_all_gather since they were sharded are gathered by these, if they are looked for (ShownParams::find_hooked).
/// Sharded parameters are shown. Needs the interpreter's lock.
void take_late_hooks(const ShownParams& params);

}  // namespace fsdp::python
