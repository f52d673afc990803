#include "collectives/all_gather.hpp"

#include <ATen/ATen.h>

#include <cstring>
#include <vector>

#include "collectives/buffer.hpp"
#include "collectives/raw_view.hpp"

namespace fsdp {

namespace {

/// Tensor-major from rank-major: piece i of rank r moves beside its neighbours.
void unpack_tail(const PieceLayout& layout, const at::Tensor& tail, const at::Tensor& unsharded) {
  const int64_t world = layout.world_size();
  if (!tail.is_cpu()) {
    for (size_t i = 0; i < layout.count(); ++i) {
      if (layout.is_direct(i)) continue;
      const int64_t bytes = layout.piece_bytes(i);
      auto from = tail.as_strided({world, bytes}, {layout.tail_bytes(), 1}, layout.tail_offset(i));
      auto to = unsharded.as_strided({world, bytes}, {bytes, 1}, layout.tensor_offset(i));
      to.copy_(from, /*non_blocking=*/true);
    }
    return;
  }
  auto* to = unsharded.mutable_data_ptr<uint8_t>();
  const auto* from = tail.const_data_ptr<uint8_t>();
  for (size_t i = 0; i < layout.count(); ++i) {
    if (layout.is_direct(i)) continue;
    const int64_t bytes = layout.piece_bytes(i);
    for (int64_t rank = 0; rank < world; ++rank)
      std::memcpy(to + layout.tensor_offset(i) + rank * bytes,
                  from + rank * layout.tail_bytes() + layout.tail_offset(i),
                  static_cast<size_t>(bytes));
  }
}

/// What one launch moves.
struct Transfers {
  std::vector<at::Tensor> outputs, inputs;
  void add(const at::Tensor& output, const at::Tensor& input) {
    outputs.push_back(output);
    inputs.push_back(input);
  }
};

Transfers transfers_of(const AllGather& gather, const at::Tensor& local) {
  const auto& layout = *gather.layout;
  Transfers transfers;
  auto piece = [&](int64_t bytes, int64_t offset) {
    return raw_view(local, bytes, local.storage_offset() + offset);
  };
  for (size_t i = 0; i < layout.count(); ++i)
    if (layout.is_direct(i) && layout.piece_bytes(i) > 0)
      transfers.add(raw_view(gather.unsharded, layout.tensor_bytes(i), layout.tensor_offset(i)),
                    piece(layout.piece_bytes(i), layout.offset(i)));
  if (layout.has_tail()) transfers.add(gather.tail, piece(layout.tail_bytes(), layout.tail_begin()));
  return transfers;
}

}  // namespace

AllGather start_all_gather(const PieceLayout& layout, const at::Tensor& local, Communicator& group,
                           std::string_view subject) {
  AllGather gather;
  gather.layout = &layout;
  gather.local = local;
  if (layout.has_direct() || !layout.has_tail())
    gather.unsharded = make_buffer(layout.total_bytes(), local.options());
  if (layout.has_tail())
    gather.tail = make_buffer(layout.tail_bytes() * layout.world_size(), local.options());
  const auto [outputs, inputs] = transfers_of(gather, local);
  if (outputs.size() == 1)
    gather.work = group.start_all_gather(outputs[0], inputs[0], subject);
  else if (!outputs.empty())
    gather.work = group.start_all_gather_batch(outputs, inputs, subject);
  return gather;
}

at::Tensor finish_all_gather(AllGather gather) {
  if (gather.work) gather.work->wait();
  const auto& layout = *gather.layout;
  if (!gather.unsharded.defined())
    gather.unsharded = make_buffer(layout.total_bytes(), gather.tail.options());
  if (layout.has_tail()) unpack_tail(layout, gather.tail, gather.unsharded);
  return gather.unsharded;
}

}  // namespace fsdp
