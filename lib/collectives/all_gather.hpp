#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string_view>

#include "collectives/piece_layout.hpp"
#include "fsdp/communicator.hpp"

namespace fsdp {

/// An all-gather of several tensors under way.
struct AllGather {
  at::Tensor unsharded;        ///< undefined until `finish_all_gather` where the backend packs
  at::Tensor packed;           ///< rank-major; undefined where nothing is packed
  std::shared_ptr<Work> work;  ///< null where there was nothing to send
  bool in_progress() const { return work != nullptr || unsharded.defined() || packed.defined(); }
};

/// Starts one collective (or one batched launch) that gathers every rank's packed pieces.
///
/// local: 1-D bytes, layout.packed_bytes() long. It must stay untouched until the gather is finished.
/// Allocates layout.total_bytes() on local's device. Runs on the current stream.
/// Throws CommError if the launch fails.
[[nodiscard]] AllGather start_all_gather(const PieceLayout& layout, const at::Tensor& local,
                                         Communicator& group, std::string_view subject);

/// Waits and returns the unsharded tensors, 1-D bytes, tensor-major as `layout` says. Where the backend packs,
/// this allocates them and frees the packed buffer: both live for the moment of the copy.
/// Throws CommError if the collective failed; nothing is left allocated then.
at::Tensor finish_all_gather(const PieceLayout& layout, AllGather gather);

}  // namespace fsdp
