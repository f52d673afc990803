#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string_view>

#include "fsdp/api.hpp"
#include "fsdp/communicator.hpp"

namespace fsdp {

/// One group's gradients of one reduce dtype, for an all-reduce hook to reduce.
struct FSDP_API AllReduceCall {
  /// 1-D, in the reduce dtype: the reduce-scatter's result on this rank, summed over the shard group, with the partial sums of
  /// earlier backwards. The hook may change it.
  at::Tensor gradients;
  /// The ranks to sum over; null if the mesh does not replicate (plain FSDP).
  Communicator* replicate_group = nullptr;
  /// The hook has to divide the sum by this. It is the divide factor; for float16 gradients, which were divided by a part of it
  /// before they were summed, the rest of it.
  double divide_factor = 1;
  /// The group's name, for errors of the collective.
  std::string_view subject = {};
};

struct FSDP_API AllReduceResult {
  /// 1-D, with as many elements as the call's, on the same device, of any floating-point dtype. These become the parameters'
  /// gradients, cast to the parameters' dtype unless MixedPrecisionPolicy::keep_low_precision_grads is set.
  at::Tensor gradients;
  /// Has to be waited for before `gradients` are read; null: they can be read at once.
  std::shared_ptr<Work> work = {};
};

/// Replaces the all-reduce across replicas (HSDP, replicate-only) and the division after it: see
/// `FSDPModule::set_all_reduce_hook`. On a mesh that does not replicate, it is called with the reduce-scatter's result, so that
/// it can sum over ranks outside the mesh. It is not called for a backward without all-reduce (set_requires_all_reduce).
///
/// All ranks of a group call it in the same order, so it may communicate. It runs outside autograd; on CUDA, on the current
/// stream.
using AllReduceHook = std::function<AllReduceResult(const AllReduceCall& call)>;

/// Divides by the divide factor, and then sums over the replicas in float16, which halves the bytes of float32. Gradients below
/// float16's range become zero. On a mesh that does not replicate it only divides.
FSDP_API AllReduceResult fp16_compress(const AllReduceCall& call);
/// Divides and sums as fp16_compress does, but in bfloat16, which has float32's range and 8 bits of precision.
FSDP_API AllReduceResult bf16_compress(const AllReduceCall& call);

}  // namespace fsdp
