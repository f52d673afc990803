#include "collectives/piece_layout.hpp"

#include "fsdp/communicator.hpp"

namespace fsdp {

namespace {
// Every dtype's alignment and one SSE register.
constexpr int64_t kAlignment = 16;
int64_t align(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
}  // namespace

PieceLayout::PieceLayout(std::vector<int64_t> piece_bytes, int world_size, int64_t packs_below)
    : piece_bytes_(std::move(piece_bytes)), offsets_(count()), world_size_(world_size) {
  if (count() == 1) {
    // It has no neighbour to be aligned for or packed with.
    tail_begin_ = rank_bytes_ = piece_bytes_[0];
    return;
  }
  for (size_t i = 0; i < count(); ++i)
    if (piece_bytes_[i] >= packs_below) place(i);
  tail_begin_ = rank_bytes_;
  for (size_t i = 0; i < count(); ++i)
    if (piece_bytes_[i] < packs_below) place(i);
}

PieceLayout::PieceLayout(std::vector<int64_t> piece_bytes, const Communicator& group)
    : PieceLayout(std::move(piece_bytes), group.size(),
                  group.launches_batches() ? group.packs_below() : kPackAll) {}

void PieceLayout::place(size_t i) {
  offsets_[i] = rank_bytes_;
  rank_bytes_ += align(piece_bytes_[i]);
}

PieceLayout PieceLayout::regrouped(int world_size) const {
  // Scaling the offsets too keeps tensor_offset(i) where it is: one unsharded buffer serves both.
  const int64_t factor = world_size_ / world_size;
  PieceLayout scaled = *this;
  for (auto& bytes : scaled.piece_bytes_) bytes *= factor;
  for (auto& offset : scaled.offsets_) offset *= factor;
  scaled.tail_begin_ *= factor;
  scaled.rank_bytes_ *= factor;
  scaled.world_size_ = world_size;
  return scaled;
}

}  // namespace fsdp
