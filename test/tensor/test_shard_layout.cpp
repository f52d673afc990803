#include <catch2/catch.hpp>

#include <torch/torch.h>

#include "draw.hpp"
#include "fsdp/error.hpp"
#include "split_log.hpp"
#include "tensor/shard_layout.hpp"

namespace fsdp::test {

TEST_CASE("5 rows over 4 ranks are held as 2, 2, 1 and 0", "[tensor][shard_layout]") {
  const ShardLayout layout(/*rows=*/5, /*world_size=*/4);
  CHECK(layout.rows(0) == 2);
  CHECK(layout.rows(1) == 2);
  CHECK(layout.rows(2) == 1);
  CHECK(layout.rows(3) == 0);
  CHECK(layout.range(2) == RowRange{4, 5});
  CHECK(layout.range(3) == RowRange{5, 5});
  CHECK(layout.rows_per_rank() == 2);
  CHECK(layout.padded_rows() == 8);
  CHECK_FALSE(layout.is_even());
}

TEST_CASE("more than one trailing rank may hold nothing", "[tensor][shard_layout]") {
  const ShardLayout layout({2, 3}, 5);
  CHECK(layout.rows(1) == 1);
  for (const int rank : {2, 3, 4}) CHECK(layout.local_sizes(rank) == std::vector<int64_t>{0, 3});
  CHECK(layout.padded_numel() == 15);
}

TEST_CASE("padding counts in padded sizes only", "[tensor][shard_layout]") {
  const ShardLayout layout({5, 2, 3}, 2);
  CHECK(layout.row_numel() == 6);
  CHECK(layout.numel() == 30);
  CHECK(layout.local_numel(0) == 18);
  CHECK(layout.local_numel(1) == 12);
  CHECK(layout.padded_local_numel() == 18);
  CHECK(layout.padded_numel() == 36);
  CHECK(layout.local_sizes(1) == std::vector<int64_t>{2, 2, 3});
}

TEST_CASE("a 0-dim tensor is one row, which rank 0 holds", "[tensor][shard_layout]") {
  const ShardLayout layout(c10::IntArrayRef{}, 3);
  CHECK(layout.rows() == 1);
  CHECK(layout.row_numel() == 1);
  CHECK(layout.local_sizes(0).empty());
  CHECK(layout.local_sizes(1) == std::vector<int64_t>{0});
  CHECK(layout.local_numel(2) == 0);
  CHECK(layout.padded_numel() == 3);
}

TEST_CASE("a tensor without rows, and one whose rows are empty, take no room", "[tensor][shard_layout]") {
  const ShardLayout no_rows({0, 4}, 3);
  CHECK(no_rows.rows_per_rank() == 0);
  CHECK(no_rows.padded_numel() == 0);
  CHECK(no_rows.local_sizes(2) == std::vector<int64_t>{0, 4});

  const ShardLayout empty_rows({5, 0}, 2);
  CHECK(empty_rows.rows(0) == 3);
  CHECK(empty_rows.padded_numel() == 0);
  CHECK(empty_rows.local_sizes(1) == std::vector<int64_t>{2, 0});
}

TEST_CASE("the pieces are those of torch's chunk, then empty ones", "[tensor][shard_layout]") {
  const uint64_t seed = draw_seed();
  INFO("FSDP_TEST_SEED=" << seed);
  Draw draw(seed);
  for (int repeat = 0; repeat < 300; ++repeat) {
    const std::vector<int64_t> sizes = draw.sizes(1, 3, 20);
    const int world_size = static_cast<int>(draw.between(1, 8));
    INFO("sizes " << c10::IntArrayRef(sizes) << " over " << world_size);
    const ShardLayout layout(sizes, world_size);
    const std::vector<at::Tensor> pieces = at::zeros(sizes).chunk(world_size, 0);
    int64_t next_row = 0;
    for (int rank = 0; rank < world_size; ++rank) {
      const bool is_in_chunk = rank < static_cast<int>(pieces.size());
      std::vector<int64_t> expected = is_in_chunk ? pieces[rank].sizes().vec() : sizes;
      if (!is_in_chunk) expected[0] = 0;
      CHECK(layout.local_sizes(rank) == expected);
      CHECK(layout.range(rank).begin == next_row);
      CHECK(layout.rows(rank) <= layout.rows_per_rank());
      next_row = layout.range(rank).end;
    }
    CHECK(next_row == sizes[0]);
  }
}

TEST_CASE("padded pieces one after another are the tensor followed by padding only",
          "[tensor][shard_layout]") {
  for (int64_t rows = 0; rows <= 9; ++rows)
    for (int world_size = 1; world_size <= 8; ++world_size) {
      const ShardLayout layout(rows, world_size);
      for (int rank = 0; rank < world_size; ++rank)
        if (layout.rows(rank) > 0) CHECK(layout.range(rank).begin == rank * layout.rows_per_rank());
      CHECK(layout.padded_rows() >= rows);
      CHECK(layout.padded_rows() - rows < world_size);
      CHECK(layout.is_even() == (rows % world_size == 0));
    }
}

TEST_CASE("a layout of no ranks, negative sizes and a rank outside of the world are refused by name",
          "[tensor][shard_layout]") {
  using Catch::Contains;
  CHECK_THAT(message_of<UsageError>([] { ShardLayout(3, 0); }), Contains("at least 1") && Contains("got 0"));
  CHECK_THAT(message_of<UsageError>([] { ShardLayout({2, -1}, 2); }),
             Contains("negative") && Contains("(2, -1)"));
  const ShardLayout layout(3, 2);
  CHECK_THAT(message_of<UsageError>([&] { layout.range(2); }), Contains("[0, 2)") && Contains("got 2"));
  CHECK_THAT(message_of<UsageError>([&] { layout.rows(-1); }), Contains("got -1"));
}

}  // namespace fsdp::test
