#include <catch2/catch.hpp>

#include "collectives/copy_pieces.hpp"
#include "support/draw.hpp"

namespace fsdp::test {
namespace {

using Bytes = std::vector<uint8_t>;

Bytes draw_bytes(Draw& draw, int64_t count) {
  Bytes bytes(static_cast<size_t>(count));
  for (auto& byte : bytes) byte = static_cast<uint8_t>(draw.between(1, 255));
  return bytes;
}

constexpr int64_t kBefore = 17;  // bytes in front of the first piece, which is aligned to nothing then

/// What `to` is to hold, byte by byte; slot: bytes of a piece with its zeros.
Bytes expected_of(Bytes to, const Bytes& from, const PieceCopy& pieces, int64_t slot) {
  for (int64_t i = 0; i < pieces.count; ++i)
    for (int64_t byte = 0; byte < slot; ++byte)
      to[static_cast<size_t>(kBefore + i * pieces.to_step + byte)] =
          byte < pieces.bytes ? from[static_cast<size_t>(i * pieces.from_step + byte)] : uint8_t{0};
  return to;
}

}  // namespace

TEST_CASE("pieces of every size are copied, and no byte beside them", "[collectives][copy_pieces]") {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    Draw draw(seed);
    PieceCopy pieces{.count = draw.between(0, 40), .bytes = static_cast<int64_t>(seed % 40)};
    pieces.to_step = pieces.bytes + draw.between(0, 2) * draw.between(0, 20);
    pieces.from_step = pieces.bytes + draw.between(0, 2) * draw.between(0, 20);
    CAPTURE(seed, pieces.count, pieces.bytes, pieces.to_step, pieces.from_step);
    const auto from = draw_bytes(draw, pieces.count * pieces.from_step + 64);
    auto to = draw_bytes(draw, kBefore + pieces.count * pieces.to_step + 64);
    const auto expected = expected_of(to, from, pieces, pieces.bytes);
    copy_pieces(to.data() + kBefore, from.data(), pieces);
    CHECK(to == expected);
  }
}

TEST_CASE("zeros fill a piece's slot, and no byte beside it", "[collectives][copy_pieces]") {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    Draw draw(seed);
    PieceCopy pieces{.count = draw.between(0, 40), .bytes = static_cast<int64_t>(1 + seed % 40)};
    const int64_t slot = (pieces.bytes + 15) / 16 * 16;
    pieces.to_step = slot + 16 * draw.between(0, 3);
    pieces.from_step = pieces.bytes + draw.between(0, 2) * draw.between(0, 20);
    CAPTURE(seed, pieces.count, pieces.bytes, pieces.to_step, pieces.from_step);
    const auto from = draw_bytes(draw, pieces.count * pieces.from_step + 64);
    auto to = draw_bytes(draw, kBefore + pieces.count * pieces.to_step + 64);
    const auto expected = expected_of(to, from, pieces, slot);
    copy_padded_pieces(to.data() + kBefore, from.data(), pieces, slot);
    CHECK(to == expected);
  }
}

}  // namespace fsdp::test
