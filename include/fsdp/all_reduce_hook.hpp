#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string_view>

#include "fsdp/communicator.hpp"

namespace fsdp {

/// What an all-reduce hook is asked to reduce: one group's gradients of one reduce dtype.
struct AllReduceCall {
  /// 1-D, in the reduce dtype: what the reduce-scatter left on this rank, summed within the shard group,
  /// with partial sums of earlier backwards. The hook may change it.
  at::Tensor gradients;
  /// The ranks to sum over; null where the mesh does not replicate (plain FSDP).
  Communicator* replicate_group = nullptr;
  /// What is left to divide the sum by, and the runtime will not divide by any more: the divide factor, or
  /// the rest of it where float16 gradients were divided before they were summed.
  double divide_factor = 1;
  /// The group's name, for the collective.
  std::string_view subject = {};
};

struct AllReduceResult {
  /// 1-D, as many elements as came in, on their device, of any floating-point dtype. It becomes the gradients,
  /// cast to the parameters' dtype (or as it is, with MixedPrecisionPolicy::keep_low_precision_grads).
  at::Tensor gradients;
  /// What is to be waited for before `gradients` may be read; null: nothing.
  std::shared_ptr<Work> work = {};
};

/// Takes the place of the all-reduce across replicas (HSDP, replicate-only) and of the division after it
/// (`FSDPModule::set_all_reduce_hook`). On a mesh that does not replicate it is called all the same, with
/// the reduce-scatter's output: for a sum over ranks that the mesh knows nothing of. Where the mesh
/// replicates, it is not called for a backward without all-reduce (set_requires_all_reduce).
///
/// All ranks of a group call it in the same order, so it may communicate. It runs below autograd, on
/// CUDA on the current stream.
using AllReduceHook = std::function<AllReduceResult(const AllReduceCall& call)>;

/// A hook: divides, then sums in float16: half of float32's bytes. Gradients below float16's range become
/// zero. Where nothing is replicated it only divides.
AllReduceResult fp16_compress(const AllReduceCall& call);
/// The same in bfloat16: float32's range with 8 bits of precision.
AllReduceResult bf16_compress(const AllReduceCall& call);

}  // namespace fsdp
