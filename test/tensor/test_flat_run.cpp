#include <catch2/catch.hpp>

#include "support/draw.hpp"
#include "fsdp/error.hpp"
#include "support/split_log.hpp"
#include "support/error_of.hpp"
#include "tensor/flat_run.hpp"

namespace fsdp::test {

TEST_CASE("tensors lie one after another, and the pieces are as short as they can be", "[tensor][flat_run]") {
  const std::vector<FlatItem> items{{5}, {3}, {8}};
  const auto run = plan_flat_run(items, /*world_size=*/4, /*alignment=*/4);
  CHECK(run.starts == std::vector<int64_t>{0, 8, 12});
  CHECK(run.piece_numel == 8);  // 20 elements in four equal pieces that begin at multiples of 4
  CHECK(run.held(12, 8, 1) == RowRange{0, 4});
  CHECK(run.held(12, 8, 2) == RowRange{4, 8});
  CHECK(run.held(12, 8, 0).count() == 0);
}

TEST_CASE("a cut never falls within a block", "[tensor][flat_run]") {
  const auto run = plan_flat_run(std::vector<FlatItem>{{2}, {10, 5}}, 2, 1);
  CHECK(run.held(run.starts[1], 10, 0) == RowRange{0, 5});
  CHECK(run.piece_numel == 7);
}

TEST_CASE("a tensor begins later if that spares it a cut", "[tensor][flat_run]") {
  // From 2 to 7 it would be cut at 3 and at 6, within a block; from 4 to 9 only at 6, between two.
  const auto run = plan_flat_run(std::vector<FlatItem>{{2}, {5, 2}}, 3, 1);
  CHECK(run.starts == std::vector<int64_t>{0, 4});
  CHECK(run.piece_numel == 3);
}

TEST_CASE("every element is held once, blocks stay whole, starts and pieces are aligned", "[tensor][flat_run]") {
  const uint64_t seed = draw_seed();
  INFO("FSDP_TEST_SEED=" << seed);
  Draw draw(seed);
  for (int repeat = 0; repeat < 300; ++repeat) {
    std::vector<FlatItem> items(static_cast<size_t>(draw.between(1, 8)));
    const bool has_blocks = draw.between(0, 1) == 1;
    for (auto& item : items) {
      item.numel = draw.between(0, 5) == 0 ? 0 : draw.between(1, 200);
      if (has_blocks) item.block_numel = draw.one_of<int64_t>({1, 2, 3, 7, 16, 60, 1000});
    }
    const int world_size = static_cast<int>(draw.between(1, 8));
    const int64_t alignment = draw.one_of<int64_t>({1, 4, 8});
    const auto run = plan_flat_run(items, world_size, alignment);
    CAPTURE(repeat, world_size, alignment);
    CHECK(run.piece_numel % alignment == 0);
    int64_t cursor = 0, total = 0;
    for (size_t i = 0; i < items.size(); ++i) {
      CHECK(run.starts[i] % alignment == 0);
      CHECK(run.starts[i] >= cursor);
      cursor = run.starts[i] + items[i].numel;
      total = (total + alignment - 1) / alignment * alignment + items[i].numel;
      int64_t next = 0;
      for (int rank = 0; rank < world_size; ++rank) {
        const auto held = run.held(run.starts[i], items[i].numel, rank);
        if (held.count() == 0) continue;
        CHECK(held.begin == next);
        next = held.end;
        if (held.end < items[i].numel) CHECK(held.end % items[i].block_numel == 0);
      }
      CHECK(next == items[i].numel);
    }
    CHECK(cursor <= run.piece_numel * world_size);
    if (!has_blocks) CHECK(run.piece_numel * world_size < total + world_size * alignment);
  }
}

TEST_CASE("a block of no elements is refused by its index", "[tensor][flat_run]") {
  using Catch::Contains;
  CHECK_THAT(error_of<UsageError>([] { plan_flat_run(std::vector<FlatItem>{{4}, {4, 0}}, 2, 1); }),
             Contains("item 1") && Contains("block of 0"));
}

}  // namespace fsdp::test
