#include "tensor/flat_run.hpp"

#include <algorithm>
#include <numeric>
#include <optional>

#include "base/require.hpp"

namespace fsdp {

namespace {

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// The first start from `cursor` on at which the cuts, every `piece` elements, leave the item's blocks
/// whole; nullopt if there is none.
std::optional<int64_t> place(const FlatItem& item, int64_t cursor, int64_t piece, int64_t alignment) {
  for (int64_t start = round_up(cursor, alignment);; start += alignment) {
    if (item.block_numel == 1 || item.numel == 0) return start;
    const int64_t cut = (start / piece + 1) * piece;  // the first one behind the start
    const int64_t end = start + item.numel;
    const bool reaches_second = end > cut + piece;
    if (end <= cut) return start;
    const bool leaves_later_whole = !reaches_second || piece % item.block_numel == 0;
    if (leaves_later_whole && (cut - start) % item.block_numel == 0) return start;
    // From one cut to the next every residue that the alignment allows has come by.
    if (start >= round_up(cursor, piece) + piece) return std::nullopt;
  }
}

std::optional<FlatRun> try_piece(std::span<const FlatItem> items, int world_size, int64_t piece,
                                 int64_t alignment) {
  FlatRun run{.starts = {}, .piece_numel = piece};
  int64_t cursor = 0;
  for (const auto& item : items) {
    const auto start = place(item, cursor, std::max<int64_t>(piece, 1), alignment);
    if (!start) return std::nullopt;
    run.starts.push_back(*start);
    cursor = *start + item.numel;
    if (cursor > piece * world_size) return std::nullopt;
  }
  return run;
}

}  // namespace

RowRange FlatRun::held(int64_t start, int64_t numel, int rank) const {
  const int64_t begin = std::clamp<int64_t>(rank * piece_numel - start, 0, numel);
  const int64_t end = std::clamp<int64_t>((rank + 1) * piece_numel - start, 0, numel);
  return {begin, end};
}

FlatRun plan_flat_run(std::span<const FlatItem> items, int world_size, int64_t alignment) {
  int64_t total = 0, common = alignment;
  for (size_t i = 0; i < items.size(); ++i) {
    require(items[i].block_numel >= 1, "flat layout: item {} has a block of {} elements; expected 1 or more",
            i, items[i].block_numel);
    total = round_up(total, alignment) + items[i].numel;
  }
  // Longer than everything together is never needed.
  for (const auto& item : items)
    if (common < total && item.numel > 0)
      common = std::lcm(common, std::min(item.block_numel, item.numel));
  common = std::min(common, round_up(std::max<int64_t>(total, 1), alignment));
  constexpr int kTries = 1000;
  int64_t piece = round_up((total + world_size - 1) / world_size, alignment);
  for (int i = 0; i < kTries; ++i, piece += alignment)
    if (auto run = try_piece(items, world_size, piece, alignment)) return *run;
  // Cuts at multiples of every block: a tensor that starts at one keeps its blocks whole.
  for (piece = round_up(std::max<int64_t>(total / world_size, 1), common);; piece += common)
    if (auto run = try_piece(items, world_size, piece, alignment)) return *run;
}

}  // namespace fsdp
