#include "collectives/all_gather.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cstring>
#include <vector>

#include "collectives/raw_view.hpp"

namespace fsdp {

namespace {

/// Tensor-major from rank-major: piece i of rank r moves beside its neighbours.
void unpack(const PieceLayout& layout, const at::Tensor& packed, const at::Tensor& unsharded) {
  const int64_t world = layout.world_size();
  if (!packed.is_cpu()) {
    for (size_t i = 0; i < layout.count(); ++i) {
      const int64_t bytes = layout.piece_bytes(i);
      auto from = packed.as_strided({world, bytes}, {layout.packed_bytes(), 1}, layout.offset(i));
      auto to = unsharded.as_strided({world, bytes}, {bytes, 1}, layout.tensor_offset(i));
      to.copy_(from, /*non_blocking=*/true);
    }
    return;
  }
  auto* to = unsharded.mutable_data_ptr<uint8_t>();
  const auto* from = packed.const_data_ptr<uint8_t>();
  for (size_t i = 0; i < layout.count(); ++i) {
    const int64_t bytes = layout.piece_bytes(i);
    for (int64_t rank = 0; rank < world; ++rank)
      std::memcpy(to + layout.tensor_offset(i) + rank * bytes,
                  from + rank * layout.packed_bytes() + layout.offset(i),
                  static_cast<size_t>(bytes));
  }
}

}  // namespace

AllGather start_all_gather(const PieceLayout& layout, const at::Tensor& local, Communicator& group,
                           std::string_view subject) {
  AllGather gather;
  auto buffer = at::empty({layout.total_bytes()}, local.options());
  if (layout.total_bytes() == 0) {
    gather.unsharded = buffer;
  } else if (layout.is_single_piece()) {
    gather.unsharded = buffer;
    gather.work = group.start_all_gather(buffer, local, subject);
  } else if (group.launches_batches()) {
    gather.unsharded = buffer;
    std::vector<at::Tensor> outputs, inputs;
    outputs.reserve(layout.count());
    inputs.reserve(layout.count());
    for (size_t i = 0; i < layout.count(); ++i) {
      if (layout.piece_bytes(i) == 0) continue;
      outputs.push_back(raw_view(buffer, layout.tensor_bytes(i), layout.tensor_offset(i)));
      inputs.push_back(raw_view(local, layout.piece_bytes(i), local.storage_offset() + layout.offset(i)));
    }
    gather.work = group.start_all_gather_batch(outputs, inputs, subject);
  } else {
    gather.packed = buffer;
    gather.work = group.start_all_gather(buffer, local, subject);
  }
  return gather;
}

at::Tensor finish_all_gather(const PieceLayout& layout, AllGather gather) {
  if (gather.work) gather.work->wait();
  if (gather.unsharded.defined()) return gather.unsharded;
  auto unsharded = at::empty({layout.total_bytes()}, gather.packed.options());
  unpack(layout, gather.packed, unsharded);
  return unsharded;
}

}  // namespace fsdp
