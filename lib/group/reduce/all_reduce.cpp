#include "group/reduce/all_reduce.hpp"

#include <ATen/ATen.h>

#include "base/plain_values.hpp"
#include "base/require.hpp"
#include "comm/scaled_sum.hpp"
#include "group/comm_context.hpp"
#include "group/param_group.hpp"
#include "group/reduce/mean_over_ranks.hpp"
#include "group/reduce/reduce_call.hpp"

namespace fsdp {
namespace {

void run_hook(ParamGroup& group, ReduceBucket& bucket, Communicator& comm) {
  const auto& input = bucket.hook_input = bucket.reduce_scatter.output;
  auto call = call_of(group, bucket, Operation::kAllReduce, comm);
  call.bytes = static_cast<int64_t>(input.nbytes());
  const AllReduceCall arguments{.gradients = input,
                                .replicate_group = group.identity().mesh_info.replicate_group.get(),
                                .divide_factor = division_of(group, bucket.dtype).after,
                                .subject = group.name()};
  auto result =
      group.parts().comm_ctx->trace.launch(call, [&] { return group.options().reduce.all_reduce_hook(arguments); });
  const auto& output = result.gradients;
  require(output.defined() && is_plain(output) && output.dim() == 1 && output.numel() == input.numel() &&
              output.is_contiguous() &&
              output.device() == input.device() && at::isFloatingType(output.scalar_type()),
          "{}: the all-reduce hook returned {}; expected one dimension of {} floating-point elements on {}, "
          "contiguous",
          group.name(), !output.defined() ? "no tensor" : is_plain(output) ? output.toString() : what_it_is(output),
          input.numel(), input.device().str());
  bucket.reduce_scatter.output = std::move(result.gradients);
  bucket.all_reduce = std::move(result.work);
  bucket.is_divided = true;
}

}  // namespace

void start_all_reduce(ParamGroup& group, ReduceBucket& bucket) {
  const auto& info = group.identity().mesh_info;
  // A hook on a mesh that does not replicate sums over ranks we know nothing of; ours all run it.
  auto& comm = info.replicate_group ? *info.replicate_group : *info.shard_group;
  if (group.options().reduce.all_reduce_hook) return run_hook(group, bucket, comm);
  auto call = call_of(group, bucket, Operation::kAllReduce, comm);
  call.bytes = static_cast<int64_t>(bucket.reduce_scatter.output.nbytes());
  group.parts().comm_ctx->meter.total().communicated_bytes += 2 * (comm.size() - 1) * call.bytes / comm.size();
  auto& launched = group.parts().launched_on(comm);
  const auto scale = scale_in_collective(group, bucket.dtype);
  auto* scaled = scale ? scaled_sums_of(launched, {.dtype = bucket.dtype, .scale = *scale}) : nullptr;
  bucket.is_divided = scaled != nullptr;
  const auto& sum = bucket.reduce_scatter.output;
  bucket.all_reduce = group.parts().comm_ctx->trace.launch(call, [&] {
    return scaled != nullptr ? scaled->start_scaled_all_reduce(sum, *scale, group.name())
                             : launched.start_all_reduce(sum, ReduceOp::kSum, group.name());
  });
}

}  // namespace fsdp
