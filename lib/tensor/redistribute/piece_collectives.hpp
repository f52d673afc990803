#pragma once

#include <string>
#include <vector>

#include "fsdp/communicator.hpp"
#include "tensor/piece.hpp"

namespace fsdp {

/// The ranks that exchange pieces, those of one mesh dimension, and what for.
struct PieceGroup {
  Communicator& group;
  std::string subject;
};

// The ranks' pieces differ in one tensor dimension `dim` alone. All are collective calls outside
// autograd; without elements they communicate nothing.

/// Gathers `wanted` from the pieces of all ranks; `of_rank[r]`: the indices of rank r's in `dim`. One all-gather of the pieces,
/// each padded with zeros to the largest.
TensorPiece all_gather_pieces(const TensorPiece& own, int64_t dim, const std::vector<IndexRanges>& of_rank,
                              const std::vector<IndexRanges>& wanted, const PieceGroup& ranks);

/// Combines the ranks' values of one piece, which all have; rank r receives the indices `of_rank[r]`
/// of `dim`. One reduce-scatter of these, each padded to the largest; an all-reduce where that
/// sends less.
TensorPiece reduce_scatter_piece(const TensorPiece& own, int64_t dim, const std::vector<IndexRanges>& of_rank, ReduceOp op,
                                 const PieceGroup& ranks);

/// Combines the ranks' values of one piece, which all have, in new memory. One all-reduce.
TensorPiece all_reduce_piece(const TensorPiece& own, ReduceOp op, const PieceGroup& ranks);

}  // namespace fsdp
