#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string_view>
#include <vector>

#include "collectives/piece_layout.hpp"
#include "collectives/view_pool.hpp"
#include "fsdp/communicator.hpp"
#include "fsdp/custom_comm.hpp"

namespace fsdp {

/// An all-gather of several tensors under way.
struct AllGather {
  const PieceLayout* layout = nullptr;
  at::Tensor local;            ///< what this rank sends
  at::Tensor unsharded;        ///< undefined until `finish_all_gather` where everything is packed
  at::Tensor tail;             ///< rank-major; undefined where nothing is packed
  std::shared_ptr<Work> work;  ///< null where there was nothing to send
};

/// Who launches a gather, and for whom.
struct GatherCall {
  Communicator& group;
  std::string_view subject;
  AllGatherComm* custom = nullptr;  ///< a user's, which allocates and launches what is packed; null: the group does
};

/// Memory that a gather is given. Undefined: it makes its own.
struct GatherMemory {
  at::Tensor unsharded;  ///< layout.total_bytes() long
  at::Tensor tail;       ///< layout.tail_bytes() of each rank
};

/// What gathers of one group are launched with, kept from one to the next.
struct GatherViews {
  ViewPool outputs;
  std::vector<at::Tensor> inputs;  ///< of what is sent, as long as that is the same memory in the same layout
};

/// Starts one collective (or one batched launch) that gathers every rank's pieces: the direct ones
/// straight to their place in the unsharded buffer, the tail packed.
///
/// local: 1-D bytes, layout.rank_bytes() long, untouched until the gather is finished, as `layout`.
/// Allocates layout.total_bytes() on local's device and, beside direct pieces, the tail's share once
/// more. Runs on the current stream. Throws CommError if the launch fails.
///
/// memory: 1-D bytes, to gather into. views: of the gather before, whose inputs are empty or of the same local and layout;
/// their outputs hold the memory until they let go, behind the gather.
[[nodiscard]] AllGather start_all_gather(const PieceLayout& layout, const at::Tensor& local, const GatherCall& call,
                                         GatherMemory memory = {}, GatherViews* views = nullptr);

/// Prepares one of a layout that packs everything, in place: this rank's part, `local`, is to be written into the buffer before
/// `launch_all_gather`. device: of the buffer. unsharded: as in GatherMemory.
[[nodiscard]] AllGather prepare_packed_all_gather(const PieceLayout& layout, const GatherCall& call, c10::Device device,
                                                  at::Tensor unsharded);
void launch_all_gather(AllGather& gather, const GatherCall& call);

/// Waits and returns the unsharded tensors, 1-D bytes, tensor-major as the layout says. Where
/// everything is packed, this allocates them and frees the packed buffer: both live for the moment
/// of the copy.
[[nodiscard]] at::Tensor finish_all_gather(AllGather gather);

/// Returns all ranks' pieces i, which were packed: (ranks, piece_bytes(i)).
at::Tensor gathered_pieces(const AllGather& gather, size_t i);
/// Puts them side by side into the unsharded buffer, `offset` bytes from its start.
void place_pieces(const AllGather& gather, size_t i, const at::Tensor& unsharded, int64_t offset);

}  // namespace fsdp
