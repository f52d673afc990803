#include <catch2/catch.hpp>

#include "collectives/piece_layout.hpp"
#include "support/draw.hpp"

namespace fsdp::test {
namespace {

std::vector<Piece> draw_pieces(Draw& draw) {
  std::vector<Piece> pieces(static_cast<size_t>(draw.between(1, 12)));
  for (auto& piece : pieces) piece.bytes = draw.between(0, 4) == 0 ? 0 : draw.between(1, 300);
  return pieces;
}

std::vector<Piece> pieces_of(std::initializer_list<int64_t> bytes) {
  std::vector<Piece> pieces;
  for (const int64_t each : bytes) pieces.push_back({.bytes = each});
  return pieces;
}

}  // namespace

TEST_CASE("pieces lie one after another, aligned to 16 bytes, none over another", "[collectives][piece_layout]") {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    Draw draw(seed);
    const auto pieces = draw_pieces(draw);
    const int64_t packs_below = draw.between(0, 300);
    const PieceLayout layout(pieces, static_cast<int>(draw.between(1, 8)), packs_below);
    CAPTURE(seed);
    std::vector<std::pair<int64_t, int64_t>> ranges;
    for (size_t i = 0; i < pieces.size(); ++i) {
      CHECK(layout.offset(i) % 16 == 0);
      CHECK(layout.offset(i) + pieces[i].bytes <= layout.rank_bytes());
      CHECK(layout.tensor_offset(i) + layout.tensor_bytes(i) <= layout.total_bytes());
      if (pieces[i].bytes > 0) ranges.emplace_back(layout.offset(i), layout.offset(i) + pieces[i].bytes);
    }
    std::sort(ranges.begin(), ranges.end());
    for (size_t i = 1; i < ranges.size(); ++i) CHECK(ranges[i - 1].second <= ranges[i].first);
  }
}

TEST_CASE("on CUDA every unsharded tensor begins where an allocation of its own could", "[collectives][piece_layout]") {
  for (const int ranks : {1, 2, 3, 8, 48, 512, 1024}) {
    const int64_t alignment = piece_alignment(c10::DeviceType::CUDA, ranks);
    CHECK(piece_alignment(c10::DeviceType::CPU, ranks) == kPieceAlignment);
    const std::vector<Piece> pieces = {{.bytes = 4}, {.bytes = 1 << 20}, {.bytes = 700}, {.bytes = 16}};
    for (const int64_t packs_below : {int64_t{0}, int64_t{1024}, PieceLayout::kPackAll}) {
      const PieceLayout layout(pieces, ranks, packs_below, alignment);
      for (size_t i = 0; i < layout.count(); ++i) {
        CAPTURE(ranks, packs_below, i);
        CHECK(layout.tensor_offset(i) % 512 == 0);
        CHECK(layout.offset(i) % kPieceAlignment == 0);
      }
    }
  }
  CHECK(piece_alignment(c10::DeviceType::CUDA, 2) == 256);
  CHECK(piece_alignment(c10::DeviceType::CUDA, 8) == 64);
  CHECK(piece_alignment(c10::DeviceType::CUDA, 64) == 16);
}

TEST_CASE("short pieces form the tail, long ones lie before it", "[collectives][piece_layout]") {
  const PieceLayout layout(pieces_of({100, 8, 64, 24}), 4, /*packs_below=*/64);
  CHECK(layout.is_direct(0));
  CHECK_FALSE(layout.is_direct(1));
  CHECK(layout.is_direct(2));
  CHECK_FALSE(layout.is_direct(3));
  CHECK(layout.tail_begin() == 112 + 64);
  CHECK(layout.tail_bytes() == 16 + 32);
  CHECK(layout.tail_offset(1) == 0);
  CHECK(layout.tail_offset(3) == 16);
}

TEST_CASE("a backend without batches gets everything packed, but a piece alone without padding",
          "[collectives][piece_layout]") {
  const PieceLayout packed(pieces_of({1000, 7}), 2);
  CHECK_FALSE(packed.has_direct());
  CHECK(packed.tail_bytes() == packed.rank_bytes());
  const PieceLayout alone(pieces_of({7}), 2);
  CHECK_FALSE(alone.has_tail());
  CHECK(alone.total_bytes() == 14);
}

TEST_CASE("pieces that do not lie side by side when unsharded are packed, however long", "[collectives][piece_layout]") {
  const PieceLayout layout({{.bytes = 96}, {.bytes = 960, .outer = 2, .rows = 4, .row_bytes = 240}}, 2, /*packs_below=*/0);
  CHECK(layout.is_direct(0));
  CHECK_FALSE(layout.is_direct(1));
  const PieceLayout alone({{.bytes = 960, .outer = 2, .rows = 4, .row_bytes = 240}}, 2, /*packs_below=*/0);
  CHECK_FALSE(alone.is_direct(0));
  CHECK(alone.tail_bytes() == 960);
  CHECK(alone.regrouped(1).piece(0).outer == 1);
}

TEST_CASE("pieces without elements are in the tail, which keeps the order of the pieces", "[collectives][piece_layout]") {
  const PieceLayout layout({{.bytes = 96}, {.bytes = 960, .outer = 2, .rows = 4, .row_bytes = 240}, {.bytes = 0}, {.bytes = 32}},
                           2, /*packs_below=*/0);
  CHECK(layout.tail_begin() == 96 + 32);
  CHECK_FALSE(layout.is_direct(2));
  CHECK(layout.tail_offset(1) == 0);
  CHECK(layout.tail_offset(2) == 960);
}

TEST_CASE("fewer ranks with longer pieces find every tensor at the same place", "[collectives][piece_layout]") {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    Draw draw(seed);
    const auto pieces = draw_pieces(draw);
    const PieceLayout layout(pieces, 8, draw.between(0, 300));
    const auto regrouped = layout.regrouped(static_cast<int>(draw.one_of<int64_t>({1, 2, 4, 8})));
    CAPTURE(seed, regrouped.world_size());
    CHECK(regrouped.total_bytes() == layout.total_bytes());
    for (size_t i = 0; i < pieces.size(); ++i) {
      CHECK(regrouped.tensor_offset(i) == layout.tensor_offset(i));
      CHECK(regrouped.tensor_bytes(i) == layout.tensor_bytes(i));
      CHECK(regrouped.is_direct(i) == layout.is_direct(i));
    }
  }
}

}  // namespace fsdp::test
