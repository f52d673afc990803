#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string_view>

#include "collectives/all_gather.hpp"
#include "fsdp/custom_comm.hpp"

namespace fsdp {

/// What a packed gather is launched with.
struct PackedGatherOptions {
  Communicator& group;
  std::string_view subject;
  AllGatherComm* custom = nullptr;  ///< allocates and launches; null: the group does
  at::TensorOptions memory;         ///< device of the buffer
  at::Tensor unsharded = {};        ///< handed through to who unpacks it; may be undefined
};

/// Starts one all-gather of one buffer of layout.total_bytes(), rank-major, in place: `write` fills this rank's
/// part, layout.rank_bytes() long. Whatever the layout says, nothing travels from place to place.
/// Runs on the current stream. Throws CommError if the launch fails.
[[nodiscard]] AllGather start_packed_all_gather(const PieceLayout& layout, const PackedGatherOptions& options,
                                                const std::function<void(const at::Tensor& part)>& write);

/// Of a packed gather: piece `i` of every rank, (ranks, piece_bytes(i)).
at::Tensor gathered_pieces(const AllGather& gather, size_t i);

/// Of a packed gather: puts piece `i` of all ranks side by side into the unsharded buffer, `offset` bytes
/// from its start.
void place_pieces(const AllGather& gather, size_t i, const at::Tensor& unsharded, int64_t offset);

/// Waits and puts all of it into the unsharded buffer, where no piece's rows lie between others'.
at::Tensor finish_packed_all_gather(AllGather gather);

}  // namespace fsdp
