#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "collectives/piece_layout.hpp"
#include "collectives/view_pool.hpp"
#include "fsdp/communicator.hpp"
#include "fsdp/custom_comm.hpp"
#include "tensor/shard_layout.hpp"

namespace fsdp {

/// One gradient that takes part in a reduction.
struct ReduceEntry {
  at::Tensor gradient;  ///< whole tensor's sizes, any strides and dtype; undefined: zero
  const ShardLayout* layout = nullptr;  ///< of the parameter; must outlive the call
  size_t segment = 0;
  int64_t start = 0;  ///< elements from the segment's first
  /// On every rank gradients are in another dtype than their sum, whatever this one is in.
  bool is_cast = false;

  /// But for the gradient.
  bool is_like(const ReduceEntry& other) const {
    return layout == other.layout && segment == other.segment && start == other.start && is_cast == other.is_cast;
  }
};

/// What is cut in pieces: one tensor, or a flat run of several.
struct ReduceSegment {
  int64_t piece_numel = 0;  ///< padded, the same on every rank
};

/// What of a group decides how segments are packed.
struct PackingRule {
  int ranks = 0;
  int64_t packs_below = 0;
  bool operator==(const PackingRule&) const = default;
};

/// A reduction, packed or under way. What it holds must stay alive until it is finished. It can be used again for another
/// one of the same segments, which takes its layout and views over.
struct ReduceScatter {
  std::shared_ptr<const PieceLayout> layout;  ///< of the segments, in the order given; null: to be made
  at::Tensor output;            ///< 1-D, reduce dtype: this rank's packed pieces, complete once waited for
  ViewPool inputs;              ///< packed gradients, or gradients themselves where they travel as they are
  ViewPool outputs;             ///< of the output, while it is under way
  std::shared_ptr<Work> work;   ///< null until it is under way, and where one rank makes the group
  bool poisons_inputs = false;  ///< when they are freed: it was started under GuardedBuffers
  int64_t itemsize = 1;         ///< bytes of an element that is summed
  bool is_custom = false;       ///< a ReduceScatterComm launched it
  PackingRule packing;          ///< that the layout was made for
  bool is_scaled = false;       ///< the collective has multiplied by what was asked for
};

struct ReduceScatterOptions {
  at::TensorOptions sum;                ///< device and dtype of the sum
  ReduceScatterComm* custom = nullptr;  ///< allocates and launches the collective, of everything packed; null: the group
  std::optional<double> scale = {};     ///< of every rank's values, where the group multiplies in the collective
  /// 1-D bytes on that device, at least `packed_bytes` long: where inputs are packed that all ranks pack. Undefined:
  /// every input is allocated.
  at::Tensor memory = {};
  bool reads_slot = false;              ///< to launch: that memory was a slot's, and something is packed there
};

/// Counts the bytes of what all ranks pack, by the layout alone, each aligned: what is small, padded, joined from several
/// gradients, or cast. What is left travels as it lies; a rank whose gradient is missing or lies otherwise packs that
/// too, in memory of its own. Gradients are not looked at. Arguments as for `pack_reduce_scatter`.
int64_t packed_bytes(std::span<const ReduceSegment> segments, std::span<const ReduceEntry> entries,
                     const ReduceScatterOptions& options, const Communicator& group);

/// Packs what `launch_reduce_scatter` is to sum over the group's ranks; each rank receives its own piece of each segment.
///
/// entries: by segment, ascending, and by start within it, at least one for every segment; all gradients
/// defined are on the sum's device; those of another dtype are cast. The same on every rank, but for the values.
/// Padding and gaps are zero. One collective, or one batched launch in which large gradients whose
/// rows the ranks divide travel without being copied.
/// The caller may drop its gradients as soon as this returns. Runs on the current stream. Where one rank makes the group
/// the output is what is packed.
///
/// reduction: new, or one that `recycle_reduce_scatter` was called for; with segments and entries other than it had,
/// its layout is null.
void pack_reduce_scatter(ReduceScatter& reduction, std::span<const ReduceSegment> segments,
                         std::span<const ReduceEntry> entries, const ReduceScatterOptions& options, Communicator& group,
                         std::string_view subject);

/// Once, with the arguments that it was packed with. Makes the output. Runs on the current stream, behind the one it was
/// packed on.
void launch_reduce_scatter(ReduceScatter& reduction, const ReduceScatterOptions& options, Communicator& group,
                           std::string_view subject);

/// On a stream that goes on behind the collective, which has been waited for.
void free_reduce_scatter_inputs(ReduceScatter& reduction);

/// Lets go of all memory, behind the last use of the output.
void recycle_reduce_scatter(ReduceScatter& reduction);

/// Where this rank's piece of segment `segment` begins in `output`, which may have come to another dtype since: elements from
/// the start of its storage.
int64_t reduced_offset(const ReduceScatter& reduction, size_t segment);

}  // namespace fsdp
