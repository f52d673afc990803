#include "collectives/reduce_scatter.hpp"

#include <ATen/ATen.h>

#include "collectives/buffer.hpp"
#include "comm/debug/poison.hpp"
#include "comm/scaled_sum.hpp"

namespace fsdp {

namespace {

/// Where the sums of the inputs go, in their order.
void list_outputs(ReduceScatter& reduction) {
  const auto& layout = *reduction.layout;
  const int64_t itemsize = reduction.itemsize, begin = reduction.output.storage_offset();
  auto& outputs = reduction.outputs;
  outputs.begin(reduction.output);
  const auto add = [&](int64_t bytes, int64_t offset) {
    outputs.add(reduction.output, bytes / itemsize, begin + offset / itemsize);
  };
  for (size_t i = 0; i < layout.count(); ++i)
    if (layout.is_direct(i) && layout.piece_bytes(i) > 0) add(layout.piece_bytes(i), layout.offset(i));
  if (layout.has_tail()) add(layout.tail_bytes(), layout.tail_begin());
}

}  // namespace

void launch_reduce_scatter(ReduceScatter& reduction, const ReduceScatterOptions& options, Communicator& group,
                           std::string_view subject) {
  if (group.size() == 1) return;
  reduction.output =
      make_buffer(reduction.layout->rank_bytes() / reduction.itemsize, options.sum, options.custom, subject);
  list_outputs(reduction);
  const auto outputs = reduction.outputs.tensors(), inputs = reduction.inputs.tensors();
  if (outputs.empty()) return;
  const auto dtype = c10::typeMetaToScalarType(options.sum.dtype());
  auto* scaled = options.scale && !reduction.is_custom
                     ? scaled_sums_of(group, {.dtype = dtype, .scale = *options.scale, .reads_slot = options.reads_slot})
                     : nullptr;
  reduction.is_scaled = scaled != nullptr;
  if (scaled != nullptr)
    reduction.work = scaled->start_scaled_reduce_scatter(outputs, inputs, *options.scale, subject);
  else if (reduction.is_custom && outputs.size() == 1)
    reduction.work = options.custom->start_reduce_scatter(outputs[0], inputs[0], ReduceOp::kSum, group, subject);
  else if (outputs.size() == 1)
    reduction.work = group.start_reduce_scatter(outputs[0], inputs[0], ReduceOp::kSum, subject);
  else
    reduction.work = group.start_reduce_scatter_batch(outputs, inputs, ReduceOp::kSum, subject);
}

void free_reduce_scatter_inputs(ReduceScatter& reduction) {
  if (reduction.poisons_inputs) [[unlikely]]
    for (const auto& input : reduction.inputs.tensors()) poison_if_last(input);
  reduction.inputs.let_go();
}

void recycle_reduce_scatter(ReduceScatter& reduction) {
  reduction.work.reset();  // one that was given up may still use the memory
  reduction.inputs.let_go();
  reduction.outputs.let_go();
  reduction.output.reset();
}

int64_t reduced_offset(const ReduceScatter& reduction, size_t segment) {
  return reduction.output.storage_offset() + reduction.layout->offset(segment) / reduction.itemsize;
}

}  // namespace fsdp
