#pragma once

#include <ATen/core/Tensor.h>

#include "param/sharded_param.hpp"

namespace fsdp {

/// What rank `shard_rank` holds of `whole` (of the parameter's sizes): in the shape of the
/// registered parameter there. A view of `whole` where it can be one.
at::Tensor local_elements(const ShardedParam& param, int shard_rank, const at::Tensor& whole);

}  // namespace fsdp
