#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace fsdp {

/// Note [Copies of shards]
/// LibTorch's Module::clone() puts `parameter.clone()` into the new module's members by set_data: a
/// part of the values where forward expects the whole, and for a Linear's rows not even an error. So a
/// copy of a cut parameter carries a mark, which set_data takes along, and the residency key. An
/// operator that meets the mark on another tensor that is to be trained says what happened. The copy itself
/// is an ordinary tensor.
void mark_shard_copy(const at::Tensor& copy, const std::string& param_name);

/// Throws StateError naming the parameter if `tensor`, a leaf that requires grad, got a marked copy by set_data.
void refuse_moved_copy(const at::Tensor& tensor);

}  // namespace fsdp
