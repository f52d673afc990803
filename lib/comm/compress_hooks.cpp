#include <ATen/ATen.h>

#include "fsdp/all_reduce_hook.hpp"

namespace fsdp {

namespace {

AllReduceResult reduce_in(at::ScalarType dtype, const AllReduceCall& call) {
  // Divided before it is cast: a sum of gradients may be beyond the range of what it travels in, their
  // average hardly ever is.
  auto gradients = call.divide_factor == 1 ? call.gradients : call.gradients.div_(call.divide_factor);
  if (call.replicate_group == nullptr) return {.gradients = std::move(gradients)};
  gradients = gradients.to(dtype);
  auto work = call.replicate_group->start_all_reduce(gradients, ReduceOp::kSum, call.subject);
  return {.gradients = std::move(gradients), .work = std::move(work)};
}

}  // namespace

AllReduceResult fp16_compress(const AllReduceCall& call) { return reduce_in(at::kHalf, call); }

AllReduceResult bf16_compress(const AllReduceCall& call) { return reduce_in(at::kBFloat16, call); }

}  // namespace fsdp
