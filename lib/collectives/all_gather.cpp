#include "collectives/all_gather.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

#include "base/raw_view.hpp"
#include "collectives/buffer.hpp"
#include "collectives/copy_pieces.hpp"

namespace fsdp {

namespace {

/// Equal parts of a packed buffer, and their places in the unsharded one.
struct CopyRun {
  int64_t from = 0, to = 0;            // bytes from the start of the packed, of the unsharded buffer
  int64_t count = 1, bytes = 0;        // parts, and bytes of each
  int64_t from_step = 0, to_step = 0;  // between parts
};

/// All ranks' pieces of a tensor in which they lie side by side.
CopyRun adjacent_run(const PieceLayout& layout, size_t i) {
  return {.from = layout.tail_offset(i),
          .to = layout.tensor_offset(i),
          .count = layout.world_size(),
          .bytes = layout.piece_bytes(i),
          .from_step = layout.tail_bytes(),
          .to_step = layout.piece_bytes(i)};
}

/// One rank's rows, which are to lie between those of the others.
CopyRun interleaved_run(const PieceLayout& layout, size_t i, int64_t rank) {
  const auto& piece = layout.piece(i);
  const int64_t chunk = piece.bytes / (piece.outer * piece.row_bytes);
  const int64_t first = std::min(rank * chunk, piece.rows);
  const int64_t bytes = (std::min(first + chunk, piece.rows) - first) * piece.row_bytes;
  return {.from = rank * layout.tail_bytes() + layout.tail_offset(i),
          .to = layout.tensor_offset(i) + first * piece.row_bytes,
          .count = piece.outer,
          .bytes = bytes,
          .from_step = bytes,
          .to_step = piece.rows * piece.row_bytes};
}

void copy_run(const CopyRun& run, const at::Tensor& tail, const at::Tensor& unsharded) {
  if (run.bytes == 0) return;
  if (!tail.is_cpu()) {
    auto view = [&](const at::Tensor& base, int64_t offset, int64_t step) {
      return raw_view(base, {run.count, run.bytes}, {step, 1}, base.storage_offset() + offset);
    };
    view(unsharded, run.to, run.to_step).copy_(view(tail, run.from, run.from_step), /*non_blocking=*/true);
    return;
  }
  copy_pieces(unsharded.mutable_data_ptr<uint8_t>() + run.to, tail.const_data_ptr<uint8_t>() + run.from,
              {.count = run.count, .bytes = run.bytes, .to_step = run.to_step, .from_step = run.from_step});
}

/// Tensor-major from rank-major.
void unpack_tail(const PieceLayout& layout, const at::Tensor& tail, const at::Tensor& unsharded) {
  for (size_t i = 0; i < layout.count(); ++i) {
    if (layout.is_direct(i) || layout.piece_bytes(i) == 0) continue;
    if (layout.piece(i).outer == 1) {
      copy_run(adjacent_run(layout, i), tail, unsharded);
      continue;
    }
    for (int64_t rank = 0; rank < layout.world_size(); ++rank)
      copy_run(interleaved_run(layout, i, rank), tail, unsharded);
  }
}

/// Where the launch puts all ranks' pieces.
void list_outputs(const AllGather& gather, ViewPool& outputs) {
  const auto& layout = *gather.layout;
  if (layout.has_direct())
    outputs.begin(gather.unsharded);
  else
    outputs.begin();
  for (size_t i = 0; i < layout.count(); ++i)
    if (layout.is_direct(i) && layout.piece_bytes(i) > 0)
      outputs.add(gather.unsharded, layout.tensor_bytes(i), layout.tensor_offset(i));
  if (layout.has_tail()) outputs.add(gather.tail);
}

/// What this rank sends there.
std::vector<at::Tensor> inputs_of(const PieceLayout& layout, const at::Tensor& local) {
  std::vector<at::Tensor> inputs;
  inputs.reserve(layout.count() + 1);
  auto add = [&](int64_t bytes, int64_t offset) {
    inputs.push_back(raw_view(local, bytes, local.storage_offset() + offset));
  };
  for (size_t i = 0; i < layout.count(); ++i)
    if (layout.is_direct(i) && layout.piece_bytes(i) > 0) add(layout.piece_bytes(i), layout.offset(i));
  if (layout.has_tail()) add(layout.tail_bytes(), layout.tail_begin());
  return inputs;
}

void launch(AllGather& gather, const GatherCall& call, std::span<const at::Tensor> outputs,
            std::span<const at::Tensor> inputs) {
  if (outputs.empty()) return;
  if (call.custom != nullptr)
    gather.work = call.custom->start_all_gather(outputs[0], inputs[0], call.group, call.subject);
  else if (outputs.size() == 1)
    gather.work = call.group.start_all_gather(outputs[0], inputs[0], call.subject);
  else
    gather.work = call.group.start_all_gather_batch(outputs, inputs, call.subject);
}

}  // namespace

AllGather start_all_gather(const PieceLayout& layout, const at::Tensor& local, const GatherCall& call, GatherMemory memory,
                           GatherViews* views) {
  AllGather gather;
  gather.layout = &layout;
  gather.local = local;
  gather.unsharded = std::move(memory.unsharded);
  gather.tail = std::move(memory.tail);
  if (!gather.unsharded.defined() && (layout.has_direct() || !layout.has_tail()))
    gather.unsharded = make_buffer(layout.total_bytes(), local.options());
  if (layout.has_tail() && !gather.tail.defined())
    gather.tail = make_buffer(layout.tail_bytes() * layout.world_size(), local.options());
  GatherViews made;
  auto& [outputs, inputs] = views != nullptr ? *views : made;
  list_outputs(gather, outputs);
  if (inputs.empty()) inputs = inputs_of(layout, local);
  launch(gather, call, outputs.tensors(), inputs);
  return gather;
}

AllGather prepare_packed_all_gather(const PieceLayout& layout, const GatherCall& call, c10::Device device,
                                    at::Tensor unsharded) {
  AllGather gather;
  gather.layout = &layout;
  gather.unsharded = std::move(unsharded);
  const int64_t bytes = layout.rank_bytes();
  gather.tail = make_buffer(layout.world_size() * bytes, at::TensorOptions().dtype(at::kByte).device(device), call.custom,
                            call.subject);
  gather.local = raw_view(gather.tail, bytes, gather.tail.storage_offset() + call.group.rank() * bytes);
  return gather;
}

void launch_all_gather(AllGather& gather, const GatherCall& call) {
  if (gather.layout->has_tail()) launch(gather, call, {&gather.tail, 1}, {&gather.local, 1});
}

at::Tensor finish_all_gather(AllGather gather) {
  if (gather.work) gather.work->wait();
  const auto& layout = *gather.layout;
  if (!gather.unsharded.defined())
    gather.unsharded = make_buffer(layout.total_bytes(), gather.tail.options());
  if (layout.has_tail()) unpack_tail(layout, gather.tail, gather.unsharded);
  return gather.unsharded;
}

at::Tensor gathered_pieces(const AllGather& gather, size_t i) {
  const auto& layout = *gather.layout;
  return raw_view(gather.tail, {layout.world_size(), layout.piece_bytes(i)}, {layout.tail_bytes(), 1},
                  gather.tail.storage_offset() + layout.tail_offset(i));
}

void place_pieces(const AllGather& gather, size_t i, const at::Tensor& unsharded, int64_t offset) {
  auto run = adjacent_run(*gather.layout, i);
  run.to = offset;
  copy_run(run, gather.tail, unsharded);
}

}  // namespace fsdp
