#include "tensor/redistribute/piece_collectives.hpp"

#include <ATen/ATen.h>

#include <algorithm>

#include "comm/watch/awaited_collectives.hpp"

namespace fsdp {
namespace {

int64_t largest(const std::vector<IndexRanges>& of_rank) {
  int64_t most = 0;
  for (const IndexRanges& indices : of_rank) most = std::max(most, count(indices));
  return most;
}

/// Room for a piece of `rows` indices of `dim` from each rank, with `dim` in front, so that each piece is
/// a run of memory and its padding comes last.
class RowBuffer {
 public:
  RowBuffer(const TensorPiece& like, int64_t dim, int64_t rows, int64_t ranks)
      : dim_(dim), rows_(rows), indices_(like.indices) {
    std::vector<int64_t> sizes = like.data.movedim(dim, 0).sizes().vec();
    sizes[0] = rows * ranks;
    data_ = at::empty(sizes, like.data.options());
  }

  const at::Tensor& data() const { return data_; }
  at::Tensor slot(int64_t rank) const { return data_.narrow(0, rank * rows_, rows_); }
  /// The slot's part for those indices of `dim`, as a piece.
  TensorPiece piece(int64_t rank, const IndexRanges& indices) const {
    TensorPiece piece{.data = slot(rank).narrow(0, 0, count(indices)).movedim(0, dim_), .indices = indices_};
    piece.indices[dim_] = indices;
    return piece;
  }
  void fill(int64_t rank, const IndexRanges& indices, const TensorPiece& from) const {
    copy_common(piece(rank, indices), from);
    const int64_t used = count(indices);
    slot(rank).narrow(0, used, rows_ - used).zero_();
  }

 private:
  int64_t dim_, rows_;
  std::vector<IndexRanges> indices_;
  at::Tensor data_;
};

/// True if the ranks' pieces one after another, each in `rows` rows, are `wanted` and padding behind it.
bool follow_each_other(const std::vector<IndexRanges>& of_rank, int64_t rows, const IndexRanges& wanted) {
  int64_t total = 0;
  for (size_t rank = 0; rank < of_rank.size(); ++rank) {
    if (of_rank[rank].empty()) continue;
    const IndexRun in_place = {
        .first_position = 0, .second_position = static_cast<int64_t>(rank) * rows, .count = count(of_rank[rank])};
    if (common_runs(of_rank[rank], wanted) != std::vector<IndexRun>{in_place}) return false;
    total += in_place.count;
  }
  return total == count(wanted);
}

/// What every backend can combine: they do not add bools, whose sum is an "or", as in LibTorch, and
/// not all know complex numbers, whose sum is that of their parts.
struct Reducible {
  Reducible(c10::ScalarType dtype, ReduceOp asked)
      : is_bool(dtype == c10::kBool),
        is_complex(c10::isComplexType(dtype)),
        op(is_bool && asked == ReduceOp::kSum ? ReduceOp::kMax : asked) {}
  at::Tensor sent(const at::Tensor& tensor) const {
    return is_bool ? tensor.to(c10::kByte) : is_complex ? at::view_as_real(tensor) : tensor;
  }
  at::Tensor received(const at::Tensor& tensor) const {
    return is_bool ? tensor.to(c10::kBool) : is_complex ? at::view_as_complex(tensor) : tensor;
  }
  bool is_bool, is_complex;
  ReduceOp op;
};

}  // namespace

TensorPiece all_gather_pieces(const TensorPiece& own, int64_t dim, const std::vector<IndexRanges>& of_rank,
                              const std::vector<IndexRanges>& wanted, const PieceGroup& ranks) {
  Communicator& group = ranks.group;
  const int64_t rows = largest(of_rank);
  const RowBuffer buffer(own, dim, rows, group.size());
  if (buffer.data().numel() > 0) {
    buffer.fill(group.rank(), own.indices[dim], own);
    awaited::all_gather(group, buffer.data(), buffer.slot(group.rank()), ranks.subject);
  }
  std::vector<IndexRanges> of_others = wanted;
  of_others[dim] = own.indices[dim];
  if (of_others == own.indices && follow_each_other(of_rank, rows, wanted[dim]))
    return {.data = buffer.data().narrow(0, 0, count(wanted[dim])).movedim(0, dim), .indices = wanted};

  TensorPiece all = empty_piece(wanted, own.data.options());
  for (int rank = 0; rank < group.size(); ++rank) copy_common(all, buffer.piece(rank, of_rank[rank]));
  return all;
}

TensorPiece reduce_scatter_piece(const TensorPiece& own, int64_t dim, const std::vector<IndexRanges>& of_rank, ReduceOp op,
                                 const PieceGroup& ranks) {
  Communicator& group = ranks.group;
  const int64_t rows = largest(of_rank);
  std::vector<IndexRanges> received = own.indices;
  received[dim] = of_rank[group.rank()];
  // A reduce-scatter sends W - 1 padded pieces, an all-reduce (a reduce-scatter and an all-gather)
  // twice what every rank has, less a W-th.
  if (rows * group.size() > 2 * count(own.indices[dim])) return cut(all_reduce_piece(own, op, ranks), received);

  const RowBuffer input(own, dim, rows, group.size());
  for (int rank = 0; rank < group.size(); ++rank) input.fill(rank, of_rank[rank], own);
  const Reducible reducible(own.data.scalar_type(), op);
  const at::Tensor sent = reducible.sent(input.data());
  std::vector<int64_t> sizes = sent.sizes().vec();
  sizes[0] = rows;
  const at::Tensor output = at::empty(sizes, sent.options());
  if (sent.numel() > 0) awaited::reduce_scatter(group, output, sent, reducible.op, ranks.subject);
  const at::Tensor piece = reducible.received(output).narrow(0, 0, count(of_rank[group.rank()]));
  return {.data = piece.movedim(0, dim), .indices = std::move(received)};
}

TensorPiece all_reduce_piece(const TensorPiece& own, ReduceOp op, const PieceGroup& ranks) {
  if (own.data.numel() == 0) return own;
  const Reducible reducible(own.data.scalar_type(), op);
  const at::Tensor sent = reducible.sent(own.data.clone(at::MemoryFormat::Contiguous));
  awaited::all_reduce(ranks.group, sent, reducible.op, ranks.subject);
  return {.data = reducible.received(sent), .indices = own.indices};
}

}  // namespace fsdp
