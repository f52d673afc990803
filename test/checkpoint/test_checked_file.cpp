#include "checkpoint/io/checked_file.hpp"

#include <catch2/catch.hpp>

#include <algorithm>
#include <random>

#include "checkpoint/checkpoint_error.hpp"
#include "checkpoint/format/block_sums.hpp"
#include "support/sample.hpp"
#include "temporary_folder.hpp"

namespace fsdp::test {
namespace {

constexpr int64_t kFileBytes = 4 * kBlockBytes + 12345;

struct Written {
  TemporaryFolder folder;
  std::string bytes;
  Catalogue::DataFile entry{"file", kFileBytes, std::vector<uint32_t>{}};

  explicit Written(uint64_t seed) {
    std::mt19937_64 draw(seed);
    for (int64_t i = 0; i < kFileBytes; ++i) bytes += static_cast<char>(draw());
    write_bytes(folder / "file", bytes);
    for (int64_t begin = 0; begin < kFileBytes; begin += kBlockBytes)
      entry.sums->push_back(block_sum(std::as_bytes(std::span(bytes).subspan(begin, std::min(kBlockBytes, kFileBytes - begin)))));
  }

  CheckedFile open(bool verifies) const {
    return {File::open_in(File::folder(folder.path()), "file", /*follow_symlinks=*/false), entry, verifies};
  }
};

struct Part {
  int64_t offset, bytes;
};

/// Short and long, within a block and over several, one behind the other or not.
std::vector<Part> draw_parts(std::mt19937_64& draw) {
  std::vector<Part> parts;
  for (int64_t at = 0; at < kFileBytes;) {
    const int64_t longest = draw() % 2 == 0 ? 3000 : 2 * kBlockBytes;
    const int64_t bytes = std::min<int64_t>(1 + static_cast<int64_t>(draw() % longest), kFileBytes - at);
    if (draw() % 3 != 0) parts.push_back({at, bytes});
    at = draw() % 4 == 0 ? (at / kBlockBytes + 1) * kBlockBytes : at + bytes;
  }
  if (draw() % 2 == 0) std::shuffle(parts.begin(), parts.end(), draw);
  return parts;
}

TEST_CASE("any parts of a file, in any order, are what was written, checked or not", "[checkpoint][checked_file]") {
  const Written written(1);
  for (uint64_t seed = 0; seed < 60; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 draw(seed);
    auto file = written.open(/*verifies=*/seed % 2 == 0);
    for (const auto& [offset, bytes] : draw_parts(draw)) {
      std::string found(bytes, '\0');
      file.read(offset, std::as_writable_bytes(std::span(found)));
      REQUIRE(found == written.bytes.substr(offset, bytes));
    }
  }
}

TEST_CASE("a byte that changed anywhere in a block fails each read of a part of that block, and no other",
          "[checkpoint][checked_file]") {
  Sample sample(1);
  for (uint64_t seed = 0; seed < 30; ++seed) {
    if (!sample.takes_next()) continue;
    CAPTURE(seed);
    std::mt19937_64 draw(seed);
    const Written written(seed);
    auto damaged = written.bytes;
    const auto at = static_cast<int64_t>(draw() % kFileBytes), block = at / kBlockBytes;
    damaged[at] = static_cast<char>(damaged[at] ^ (1 << (draw() % 8)));
    write_bytes(written.folder / "file", damaged);
    auto file = written.open(/*verifies=*/true);
    for (const auto& [offset, bytes] : draw_parts(draw)) {
      std::string found(bytes, '\0');
      const auto into = std::as_writable_bytes(std::span(found));
      const bool touches = offset / kBlockBytes <= block && block <= (offset + bytes - 1) / kBlockBytes;
      if (touches)
        REQUIRE_THROWS_AS(file.read(offset, into), CheckpointError);
      else
        REQUIRE_NOTHROW(file.read(offset, into));
    }
  }
}

}  // namespace
}  // namespace fsdp::test
