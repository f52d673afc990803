#include <catch2/catch.hpp>

#include <torch/torch.h>

#include "dense_tensor.hpp"
#include "support/draw.hpp"
#include "fsdp/error.hpp"
#include "support/split_log.hpp"
#include "support/error_of.hpp"
#include "tensor/shard_part.hpp"

namespace fsdp::test {
namespace {

std::vector<int64_t> local_sizes(const ShardLayout& layout, int rank) {
  return c10::IntArrayRef(layout.local_sizes(rank)).vec();
}

}  // namespace

TEST_CASE("5 rows over 4 ranks are held as 2, 2, 1 and 0", "[tensor][shard_layout]") {
  const ShardLayout layout(/*rows=*/5, /*world_size=*/4);
  CHECK(layout.rows(0) == 2);
  CHECK(layout.rows(1) == 2);
  CHECK(layout.rows(2) == 1);
  CHECK(layout.rows(3) == 0);
  CHECK(layout.range(2) == RowRange{4, 5});
  CHECK(layout.range(3) == RowRange{5, 5});
  CHECK(layout.padded_local_numel() == 2);
}

TEST_CASE("more than one trailing rank may hold nothing", "[tensor][shard_layout]") {
  const ShardLayout layout({2, 3}, 5);
  CHECK(layout.rows(1) == 1);
  for (const int rank : {2, 3, 4}) CHECK(local_sizes(layout, rank) == std::vector<int64_t>{0, 3});
  CHECK(layout.padded_local_numel() == 3);
}

TEST_CASE("padding counts in padded sizes only", "[tensor][shard_layout]") {
  const ShardLayout layout({5, 2, 3}, 2);
  CHECK(layout.row_numel() == 6);
  CHECK(layout.numel() == 30);
  CHECK(layout.local_numel(0) == 18);
  CHECK(layout.local_numel(1) == 12);
  CHECK(layout.padded_local_numel() == 18);
  CHECK(local_sizes(layout, 1) == std::vector<int64_t>{2, 2, 3});
}

TEST_CASE("a 0-dim tensor is one row, which rank 0 holds", "[tensor][shard_layout]") {
  const ShardLayout layout(c10::IntArrayRef{}, 3);
  CHECK(layout.rows() == 1);
  CHECK(layout.row_numel() == 1);
  CHECK(local_sizes(layout, 0).empty());
  CHECK(local_sizes(layout, 1) == std::vector<int64_t>{0});
  CHECK(layout.local_numel(2) == 0);
  CHECK(layout.padded_local_numel() == 1);
}

TEST_CASE("a tensor without rows, and one whose rows are empty, take no room", "[tensor][shard_layout]") {
  const ShardLayout no_rows({0, 4}, 3);
  CHECK(no_rows.padded_local_numel() == 0);
  CHECK(local_sizes(no_rows, 2) == std::vector<int64_t>{0, 4});

  const ShardLayout empty_rows({5, 0}, 2);
  CHECK(empty_rows.rows(0) == 3);
  CHECK(empty_rows.padded_local_numel() == 0);
  CHECK(local_sizes(empty_rows, 1) == std::vector<int64_t>{2, 0});
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
      CHECK(local_sizes(layout, rank) == expected);
      CHECK(layout.range(rank).begin == next_row);
      CHECK(layout.local_numel(rank) <= layout.padded_local_numel());
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
      const int64_t padded = layout.padded_local_numel() * world_size;
      for (int rank = 0; rank < world_size; ++rank)
        if (layout.rows(rank) > 0) CHECK(layout.range(rank).begin == rank * layout.padded_local_numel());
      CHECK(padded >= rows);
      CHECK(padded - rows < world_size);
      CHECK((padded == rows) == (rows % world_size == 0));
    }
}

TEST_CASE("a layout of no ranks, negative sizes and a rank outside of the world are refused by name",
          "[tensor][shard_layout]") {
  using Catch::Contains;
  CHECK_THAT(error_of<UsageError>([] { ShardLayout(3, 0); }), Contains("at least 1") && Contains("got 0"));
  CHECK_THAT(error_of<UsageError>([] { ShardLayout({2, -1}, 2); }),
             Contains("negative") && Contains("(2, -1)"));
  const ShardLayout layout(3, 2);
  CHECK_THAT(error_of<UsageError>([&] { layout.range(2); }), Contains("[0, 2)") && Contains("got 2"));
  CHECK_THAT(error_of<UsageError>([&] { layout.rows(-1); }), Contains("got -1"));
}

namespace {

/// What the ranges name, in their order.
at::Tensor elements_in(const std::vector<ElementRange>& ranges) {
  std::vector<at::Tensor> parts{at::empty({0}, at::kLong)};
  for (const auto& range : ranges) parts.push_back(at::arange(range.begin, range.end, at::kLong));
  return at::cat(parts);
}

}  // namespace

TEST_CASE("along any dimension of any dense tensor, pieces are torch's chunks, and their strides leave no gaps",
          "[tensor][shard_layout]") {
  const uint64_t seed = draw_seed();
  INFO("FSDP_TEST_SEED=" << seed);
  Draw draw(seed);
  for (int repeat = 0; repeat < 300; ++repeat) {
    const auto whole = draw_dense(draw);  // element i holds i, counted row-major
    const int64_t dim = whole.dim() == 0 ? 0 : draw.between(0, whole.dim() - 1);
    const int world_size = static_cast<int>(draw.between(1, 6));
    INFO("sizes " << whole.sizes() << " strides " << whole.strides() << " dim " << dim << " over " << world_size);
    const ShardLayout layout(whole.sizes(), whole.strides(), dim, world_size);
    const auto chunks = whole.dim() == 0 ? std::vector<at::Tensor>{whole} : whole.chunk(world_size, dim);
    for (int rank = 0; rank < world_size; ++rank) {
      const auto part = part_of(layout, whole, rank);
      CHECK(part.sizes() == c10::IntArrayRef(layout.local_sizes(rank)));
      CHECK(part.numel() == layout.local_numel(rank));
      CHECK(layout.local_numel(rank) <= layout.padded_local_numel());
      if (rank < static_cast<int>(chunks.size())) CHECK(part.equal(chunks[rank]));
      // The order of dimensions in memory is kept, so a copy to these strides is all there is to do.
      auto local = at::empty_strided(layout.local_sizes(rank), layout.local_strides(rank), at::kLong);
      CHECK((local.numel() < 2 || local.is_non_overlapping_and_dense()));
      local.copy_(part);
      CHECK(local.reshape({-1}).equal(elements_in(element_ranges(layout, rank))));
    }
  }
}

TEST_CASE("in memory a dense tensor is its pieces interleaved as outer, rows and row_numel say",
          "[tensor][shard_layout]") {
  const uint64_t seed = draw_seed();
  INFO("FSDP_TEST_SEED=" << seed);
  Draw draw(seed);
  for (int repeat = 0; repeat < 300; ++repeat) {
    const auto whole = draw_dense(draw);
    if (whole.numel() == 0 || whole.dim() == 0) continue;
    const int64_t dim = draw.between(0, whole.dim() - 1);
    const int world_size = static_cast<int>(draw.between(2, 6));
    INFO("sizes " << whole.sizes() << " strides " << whole.strides() << " dim " << dim << " over " << world_size);
    const ShardLayout layout(whole.sizes(), whole.strides(), dim, world_size);
    REQUIRE(layout.numel() == whole.numel());
    const auto memory = whole.as_strided({layout.outer(), layout.rows(), layout.row_numel()},
                                         {layout.rows() * layout.row_numel(), layout.row_numel(), 1});
    for (int rank = 0; rank < world_size; ++rank) {
      const auto held = layout.range(rank);
      auto local = at::empty_strided(layout.local_sizes(rank), layout.local_strides(rank), at::kLong);
      local.copy_(part_of(layout, whole, rank));
      CHECK(local.as_strided({local.numel()}, {1}).equal(memory.narrow(1, held.begin, held.count()).reshape({-1})));
    }
  }
}

TEST_CASE("a flat piece is a range of the memory", "[tensor][shard_layout]") {
  const auto whole = at::arange(6, at::kLong).view({2, 3}).t().contiguous().t();  // in memory: 0 3 1 4 2 5
  const auto layout = ShardLayout::flat(whole.sizes(), whole.strides(), {{0, 4}, {4, 4}, {4, 6}});
  CHECK(local_sizes(layout, 0) == std::vector<int64_t>{4});
  CHECK(layout.local_numel(1) == 0);
  CHECK(part_of(layout, whole, 0).equal(at::tensor({0, 3, 1, 4}, at::kLong)));
  CHECK(part_of(layout, whole.contiguous(), 2).equal(at::tensor({2, 5}, at::kLong)));
  CHECK(elements_in(element_ranges(layout, 0)).equal(at::tensor({0, 3, 1, 4}, at::kLong)));
  CHECK(element_ranges(layout, 1).empty());
}

TEST_CASE("a cut has one hash, whichever rank asks, and another cut has another", "[tensor][shard_layout]") {
  const std::vector<int64_t> sizes{4, 6}, across{1, 4}, along{6, 1};
  CHECK(ShardLayout(sizes, along, 0, 2) == ShardLayout(sizes, 2));
  CHECK(cut_hash(ShardLayout(sizes, along, 0, 2)) == cut_hash(ShardLayout(sizes, across, 0, 2)));  // the same rows
  CHECK(ShardLayout(sizes, along, 0, 2) != ShardLayout(sizes, across, 0, 2));
  CHECK(cut_hash(ShardLayout(sizes, along, 0, 1)) == cut_hash(ShardLayout(sizes, along, 1, 1)));
  const std::vector<ShardLayout> cuts{ShardLayout(sizes, along, 0, 2),
                                      ShardLayout(sizes, along, 1, 2),
                                      ShardLayout(sizes, along, 0, 3),
                                      ShardLayout(sizes, along, 0, 1),
                                      ShardLayout::flat(sizes, along, {{0, 12}, {12, 24}}),
                                      ShardLayout::flat(sizes, along, {{0, 13}, {13, 24}}),
                                      ShardLayout::flat(sizes, along, {{0, 12}, {12, 24}, {24, 24}}),
                                      ShardLayout::flat(sizes, across, {{0, 12}, {12, 24}})};
  for (size_t i = 0; i < cuts.size(); ++i)
    for (size_t j = 0; j < i; ++j) {
      CAPTURE(i, j);
      CHECK(cut_hash(cuts[i]) != cut_hash(cuts[j]));
      CHECK(cuts[i] != cuts[j]);
    }
}

}  // namespace fsdp::test
