#include "collectives/piece_layout.hpp"

namespace fsdp {

namespace {
// Every dtype's alignment and one SSE register.
constexpr int64_t kAlignment = 16;
int64_t align(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
}  // namespace

PieceLayout::PieceLayout(std::vector<int64_t> piece_bytes, int world_size)
    : piece_bytes_(std::move(piece_bytes)), world_size_(world_size) {
  offsets_.reserve(piece_bytes_.size());
  for (int64_t bytes : piece_bytes_) {
    offsets_.push_back(packed_bytes_);
    packed_bytes_ += align(bytes);
  }
  // One piece alone has no neighbour to be aligned for, and without a gap it needs no copy.
  if (count() == 1) packed_bytes_ = piece_bytes_[0];
}

PieceLayout PieceLayout::regrouped(int world_size) const {
  // Scaling the offsets too keeps tensor_offset(i) where it is: one unsharded buffer serves both.
  const int64_t factor = world_size_ / world_size;
  auto scaled = [factor](std::vector<int64_t> values) {
    for (auto& value : values) value *= factor;
    return values;
  };
  return {scaled(piece_bytes_), scaled(offsets_), packed_bytes_ * factor, world_size};
}

}  // namespace fsdp
