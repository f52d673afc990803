#include "collectives/reduce_scatter.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "collectives/buffer.hpp"
#include "collectives/raw_view.hpp"

namespace fsdp {

namespace {

bool lies_as(const at::Tensor& gradient, const ReduceEntry& entry) {
  return gradient.strides() == c10::IntArrayRef(entry.strides);
}

bool is_cast(const ReduceEntry& entry, const at::Tensor& to) {
  return entry.gradient.defined() && entry.gradient.dtype() != to.dtype();
}

int64_t piece_numel(const ReduceEntry& entry) { return entry.rows_per_rank * entry.row_numel; }

/// Writes rows [first, last) of the entry's gradient, laid as in memory, to `to` (1-D, of a piece's
/// length or more), zeros after them.
void write_rows(const ReduceEntry& entry, int64_t first, int64_t last, const at::Tensor& to) {
  const int64_t numel = (last - first) * entry.row_numel;
  if (!entry.gradient.defined() || numel <= 0) {
    to.zero_();
    return;
  }
  if (entry.sizes.empty()) {
    to.narrow(0, 0, 1).copy_(entry.gradient.reshape({1}));
  } else {
    auto sizes = entry.sizes;
    sizes[0] = last - first;
    const auto rows = entry.gradient.narrow(0, first, last - first);
    if (to.is_cpu() && lies_as(entry.gradient, entry) && !is_cast(entry, to)) {
      std::memcpy(to.mutable_data_ptr(), rows.const_data_ptr(),
                  static_cast<size_t>(numel) * to.element_size());
    } else {
      to.as_strided(sizes, entry.strides, to.storage_offset()).copy_(rows);
    }
  }
  if (numel < to.numel()) to.narrow(0, numel, to.numel() - numel).zero_();
}

int64_t row_count(const ReduceEntry& entry) { return entry.sizes.empty() ? 1 : entry.sizes[0]; }

/// Writes one rank's pieces that lie from `begin` (bytes) on, and zeros between them: the gaps are
/// summed like the rest. In that part the entries lie in their own order.
void write_pieces(std::span<const ReduceEntry> entries, const PieceLayout& layout, int64_t rank,
                  int64_t begin, const at::Tensor& to) {
  int64_t end = to.numel();
  for (size_t i = entries.size(); i-- > 0;) {
    if (layout.offset(i) < begin) continue;
    const auto& entry = entries[i];
    const int64_t rows = row_count(entry);
    const int64_t first = std::min(rows, rank * entry.rows_per_rank);
    const int64_t last = std::min(rows, first + entry.rows_per_rank);
    const int64_t at = (layout.offset(i) - begin) / to.element_size();
    write_rows(entry, first, last, to.narrow(0, at, end - at));
    end = at;
  }
}

/// Rank-major: what one collective takes.
at::Tensor pack_tail(std::span<const ReduceEntry> entries, const PieceLayout& layout,
                     const at::TensorOptions& options) {
  const int64_t numel = layout.tail_bytes() / static_cast<int64_t>(options.dtype().itemsize());
  auto input = make_buffer(layout.world_size() * numel, options);
  for (int64_t rank = 0; rank < layout.world_size(); ++rank)
    write_pieces(entries, layout, rank, layout.tail_begin(), input.narrow(0, rank * numel, numel));
  return input;
}

/// Tensor-major: one tensor's pieces side by side, the gradient itself where that is what it is.
at::Tensor whole(const ReduceEntry& entry, int world_size, const at::TensorOptions& options) {
  const int64_t numel = piece_numel(entry) * world_size;
  const auto& gradient = entry.gradient;
  if (gradient.defined() && gradient.numel() == numel && lies_as(gradient, entry) &&
      gradient.dtype() == options.dtype())
    return raw_view(gradient, numel, gradient.storage_offset());
  auto input = make_buffer(numel, options);
  write_rows(entry, 0, row_count(entry), input);
  return input;
}

}  // namespace

ReduceScatter start_reduce_scatter(std::span<const ReduceEntry> entries, at::ScalarType dtype,
                                   c10::Device device, Communicator& group,
                                   std::string_view subject) {
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  const int64_t itemsize = static_cast<int64_t>(options.dtype().itemsize());
  std::vector<int64_t> piece_bytes;
  piece_bytes.reserve(entries.size());
  for (const auto& entry : entries) piece_bytes.push_back(piece_numel(entry) * itemsize);

  ReduceScatter reduction;
  reduction.layout = group.size() == 1 ? PieceLayout(std::move(piece_bytes), /*world_size=*/1)
                                       : PieceLayout(std::move(piece_bytes), group);
  const auto& layout = reduction.layout;
  reduction.output = make_buffer(layout.rank_bytes() / itemsize, options);
  if (group.size() == 1) {
    write_pieces(entries, layout, /*rank=*/0, /*begin=*/0, reduction.output);
    return reduction;
  }
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (!layout.is_direct(i) || layout.piece_bytes(i) == 0) continue;
    reduction.inputs.push_back(whole(entries[i], group.size(), options));
    outputs.push_back(
        raw_view(reduction.output, piece_numel(entries[i]), layout.offset(i) / itemsize));
  }
  if (layout.has_tail()) {
    reduction.inputs.push_back(pack_tail(entries, layout, options));
    outputs.push_back(raw_view(reduction.output, layout.tail_bytes() / itemsize,
                               layout.tail_begin() / itemsize));
  }
  if (outputs.size() == 1)
    reduction.work =
        group.start_reduce_scatter(outputs[0], reduction.inputs[0], ReduceOp::kSum, subject);
  else if (!outputs.empty())
    reduction.work = group.start_reduce_scatter_batch(outputs, reduction.inputs, ReduceOp::kSum,
                                                      subject);
  return reduction;
}

int64_t planned_bytes(const ReduceScatter& reduction, std::span<const ReduceEntry> entries) {
  const auto& layout = reduction.layout;
  const int64_t world = layout.world_size();
  int64_t bytes = layout.rank_bytes();
  if (world == 1) return bytes;
  bytes += world * layout.tail_bytes();
  // What the ranks do not divide needs padding, and so a copy, as does what is cast.
  for (size_t i = 0; i < entries.size(); ++i)
    if (layout.is_direct(i) && (row_count(entries[i]) != world * entries[i].rows_per_rank ||
                                is_cast(entries[i], reduction.output)))
      bytes += layout.tensor_bytes(i);
  return bytes;
}

void finish_reduce_scatter(ReduceScatter& reduction) {
  if (reduction.work) reduction.work->wait();
  reduction.work.reset();
  reduction.inputs.clear();
}

at::Tensor reduced_piece(const ReduceScatter& reduction, size_t i, int64_t numel) {
  const auto offset = reduction.layout.offset(i) / reduction.output.element_size();
  return raw_view(reduction.output, numel, offset);
}

}  // namespace fsdp
