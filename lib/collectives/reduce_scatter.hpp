#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "collectives/piece_layout.hpp"
#include "fsdp/communicator.hpp"

namespace fsdp {

/// One gradient that takes part in a reduction.
struct ReduceEntry {
  at::Tensor gradient;  ///< whole tensor's sizes, any strides and dtype; undefined: zero
  /// Sizes and strides of the whole tensor in memory; dimension 0 is outermost. 0-dim: both empty.
  std::vector<int64_t> sizes, strides;
  int64_t rows_per_rank = 0;  ///< padded
  int64_t row_numel = 0;
};

/// A reduction under way. What it holds must stay alive until it is finished.
struct ReduceScatter {
  PieceLayout layout;           ///< of the entries, in the order given
  at::Tensor output;            ///< 1-D, reduce dtype: this rank's packed pieces, complete once waited for
  std::vector<at::Tensor> inputs;  ///< packed gradients, or gradients themselves where they travel as they are
  std::shared_ptr<Work> work;   ///< null where one rank makes the group
};

/// Sums the entries over the group's ranks; each rank receives its own rows of each.
///
/// entries: all gradients defined are on `device`; those of another dtype than `dtype` are cast. The
/// same list on every rank, but for the values.
/// Padding rows are zero. One collective, or one batched launch in which large gradients whose rows
/// the ranks divide travel without being copied.
/// The caller may drop its gradients as soon as this returns. Runs on the current stream.
[[nodiscard]] ReduceScatter start_reduce_scatter(std::span<const ReduceEntry> entries,
                                                 at::ScalarType dtype, c10::Device device,
                                                 Communicator& group, std::string_view subject);

/// The bytes that a started reduction of these entries allocates, by its layout, if every gradient
/// is there and lies in memory as its entry says.
int64_t planned_bytes(const ReduceScatter& reduction, std::span<const ReduceEntry> entries);

/// Waits and frees the inputs; `output` is complete. Throws CommError if the collective failed.
void finish_reduce_scatter(ReduceScatter& reduction);

/// Entry i's rows of this rank inside `output`: 1-D, `numel` elements (without padding).
at::Tensor reduced_piece(const ReduceScatter& reduction, size_t i, int64_t numel);

}  // namespace fsdp
