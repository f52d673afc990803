#include "collectives/packed_gather.hpp"

#include <ATen/ATen.h>

#include "collectives/buffer.hpp"
#include "collectives/raw_view.hpp"

namespace fsdp {

AllGather start_packed_all_gather(const PieceLayout& layout, const PackedGatherOptions& options,
                                  const std::function<void(const at::Tensor& part)>& write) {
  AllGather gather;
  gather.layout = &layout;
  gather.unsharded = options.unsharded;
  gather.is_packed = true;
  const int64_t bytes = layout.rank_bytes();
  gather.tail = make_buffer(layout.world_size() * bytes, options.memory.dtype(at::kByte), options.custom,
                            options.subject);
  gather.local = raw_view(gather.tail, bytes, gather.tail.storage_offset() + options.group.rank() * bytes);
  write(gather.local);
  if (bytes == 0) return gather;
  gather.work = options.custom != nullptr
                    ? options.custom->start_all_gather(gather.tail, gather.local, options.group, options.subject)
                    : options.group.start_all_gather(gather.tail, gather.local, options.subject);
  return gather;
}

at::Tensor gathered_pieces(const AllGather& gather, size_t i) {
  const auto& layout = *gather.layout;
  return raw_view(gather.tail, {layout.world_size(), layout.piece_bytes(i)}, {layout.rank_bytes(), 1},
                  gather.tail.storage_offset() + layout.offset(i));
}

void place_pieces(const AllGather& gather, size_t i, const at::Tensor& unsharded, int64_t offset) {
  const auto& layout = *gather.layout;
  raw_view(unsharded, {layout.world_size(), layout.piece_bytes(i)}, {layout.piece_bytes(i), 1},
           unsharded.storage_offset() + offset)
      .copy_(gathered_pieces(gather, i), /*non_blocking=*/true);
}

at::Tensor finish_packed_all_gather(AllGather gather) {
  if (gather.work) gather.work->wait();
  const auto& layout = *gather.layout;
  if (!gather.unsharded.defined()) gather.unsharded = make_buffer(layout.total_bytes(), gather.tail.options());
  for (size_t i = 0; i < layout.count(); ++i)
    if (layout.piece_bytes(i) > 0) place_pieces(gather, i, gather.unsharded, layout.tensor_offset(i));
  return gather.unsharded;
}

}  // namespace fsdp
