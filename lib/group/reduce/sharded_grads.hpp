#pragma once

#include <ATen/core/Tensor.h>

#include "group/reduce/reduce_bucket.hpp"

namespace fsdp {

struct FSDPParam;
class ParamGroup;
class UserHooks;

/// One rank's gradients, which are no sums: whether they stay referred to when they have been assigned.
enum class KeepsAlone : bool {
  kNo,
  kYes,  ///< they are beside the stream that they were made for, for as long as that goes on without them
};

/// Waits for the buckets' all-reduces, divides what no collective has, and puts or adds each parameter's rows to the `.grad` of
/// its sharded parameter, in the dtype that it is kept in and on the device where it lives. Runs users' hooks on gradients.
/// Throws StateError where a user has put a gradient of other sizes there.
///
/// hooks: who is told of users' hooks; null where `has_user_hooks` says of every parameter that there are none.
void assign_sharded_grads(ParamGroup& group, ReduceInputs& inputs, KeepsAlone keeps_alone, UserHooks* hooks);

/// True if a user's hooks wait for the gradient of what is registered of a parameter: tensor hooks or post-accumulate ones.
bool has_user_hooks(const FSDPParam& param);

}  // namespace fsdp
