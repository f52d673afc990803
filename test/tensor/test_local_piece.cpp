#include <catch2/catch.hpp>

#include "fsdp/error.hpp"
#include "support/printed.hpp"
#include "support/split_log.hpp"
#include "support/error_of.hpp"
#include "tensor/local_piece.hpp"
#include "tensor/piece_map.hpp"
#include "whole_tensors.hpp"

namespace fsdp::test {
namespace {

using Sizes = std::vector<int64_t>;

using Indices = std::vector<IndexRanges>;

DeviceMesh silent_mesh(const Sizes& shape) {
  return mesh_of(SplitLog::world(0, static_cast<int>(c10::multiply_integers(shape))), shape);
}

/// The indices of a dimension of `size` that the rank at `coordinates` holds.
at::Tensor indices_of(int64_t size, const Sizes& shape, const Sizes& coordinates,
                      const std::vector<Placement>& placements) {
  std::vector<at::Tensor> ranges = {torch::empty({0}, torch::kLong)};
  for (const IndexRange& range : PieceMap({size}, shape, placements).indices(0, coordinates))
    ranges.push_back(torch::arange(range.begin, range.end));
  return torch::cat(ranges);
}

/// What Shard does, said in LibTorch: the `index`-th chunk, empty where there are fewer.
at::Tensor chunk_of(const at::Tensor& tensor, int64_t chunks, int64_t index) {
  const auto all = tensor.chunk(chunks);
  return index < static_cast<int64_t>(all.size()) ? all[index] : tensor.narrow(0, 0, 0);
}

}  // namespace

TEST_CASE("a piece has the rows of its rank and says where they start", "[tensor][local_piece]") {
  const LocalPiece piece = local_piece({5, 3}, {4}, {2}, {Shard{0}});
  CHECK(piece.sizes == Sizes{1, 3});
  CHECK(piece.indices == Indices{{{4, 5}}, {{0, 3}}});
  CHECK(local_piece({5, 3}, {4}, {3}, {Shard{0}}).sizes == Sizes{0, 3});
  CHECK(local_piece({5, 3}, {4}, {3}, {Shard{0}}).indices == Indices{{}, {{0, 3}}});
}

TEST_CASE("two mesh dimensions may cut two tensor dimensions", "[tensor][local_piece]") {
  const LocalPiece piece = local_piece({4, 5}, {2, 3}, {1, 2}, {Shard{0}, Shard{1}});
  CHECK(piece.sizes == Sizes{2, 1});
  CHECK(piece.indices == Indices{{{2, 4}}, {{4, 5}}});
}

TEST_CASE("the second Shard of a dimension cuts what the first one left", "[tensor][local_piece]") {
  // 7 rows: mesh row 0 has 0..3, which are cut in 2, 2 and 0; mesh row 1 has 4..6, cut in 1, 1 and 1.
  const std::vector<Placement> both = {Shard{0}, Shard{0}};
  CHECK(local_piece({7}, {2, 3}, {0, 1}, both).sizes == Sizes{2});
  CHECK(local_piece({7}, {2, 3}, {0, 1}, both).indices == Indices{{{2, 4}}});
  CHECK(local_piece({7}, {2, 3}, {0, 2}, both).sizes == Sizes{0});
  CHECK(local_piece({7}, {2, 3}, {1, 2}, both).sizes == Sizes{1});
  CHECK(local_piece({7}, {2, 3}, {1, 2}, both).indices == Indices{{{6, 7}}});
}

TEST_CASE("Replicate and Partial pieces have the whole size", "[tensor][local_piece]") {
  const LocalPiece piece = local_piece({5, 3}, {2, 2}, {1, 1}, {Partial{}, Replicate{}});
  CHECK(piece.sizes == Sizes{5, 3});
  CHECK(piece.indices == Indices{{{0, 5}}, {{0, 3}}});
}

TEST_CASE("a StridedShard cuts what the Shard to its right has made", "[tensor][local_piece]") {
  // 7 rows: tensor parallelism has 0..3 and 4..6; FSDP cuts these in 2, 2, 0 and in 1, 1, 1.
  const std::vector<Placement> placements = {StridedShard{0, 2}, Shard{0}};
  CHECK(local_piece({7}, {3, 2}, {0, 0}, placements).indices == Indices{{{0, 2}}});
  CHECK(local_piece({7}, {3, 2}, {0, 1}, placements).indices == Indices{{{4, 5}}});
  CHECK(local_piece({7}, {3, 2}, {1, 0}, placements).indices == Indices{{{2, 4}}});
  CHECK(local_piece({7}, {3, 2}, {1, 1}, placements).indices == Indices{{{5, 6}}});
  // torch's _StridedShard gives row 6 to the other of these two.
  CHECK(local_piece({7}, {3, 2}, {2, 0}, placements).indices == Indices{{}});
  CHECK(local_piece({7}, {3, 2}, {2, 1}, placements).indices == Indices{{{6, 7}}});
}

TEST_CASE("a StridedShard alone holds a part of every chunk", "[tensor][local_piece]") {
  const LocalPiece piece = local_piece({9, 2}, {4}, {0}, {StridedShard{0, 2}});
  CHECK(piece.sizes == Sizes{3, 2});
  CHECK(piece.indices == Indices{{{0, 2}, {5, 6}}, {{0, 2}}});
}

TEST_CASE("FSDP's piece is a chunk of the tensor-parallel piece, whatever the sizes", "[tensor][local_piece]") {
  const uint64_t seed = draw_seed();
  INFO("FSDP_TEST_SEED=" << seed);
  Draw draw(seed);
  for (int repeat = 0; repeat < 300; ++repeat) {
    const int64_t size = draw.between(0, 30), dp = draw.between(1, 4), tp = draw.between(1, 4), cp = draw.between(1, 3);
    const int64_t i = draw.between(0, dp - 1), j = draw.between(0, tp - 1), k = draw.between(0, cp - 1);
    const at::Tensor whole = torch::arange(size);
    const at::Tensor of_tp = chunk_of(whole, tp, j);
    CHECK(at::equal(indices_of(size, {dp, tp}, {i, j}, {StridedShard{0, tp}, Shard{0}}), chunk_of(of_tp, dp, i)));
    // Two dimensions to the right cut the same one, left to right, before this one does.
    CHECK(at::equal(indices_of(size, {dp, tp, cp}, {i, j, k}, {StridedShard{0, tp * cp}, Shard{0}, Shard{0}}),
                    chunk_of(chunk_of(of_tp, cp, k), dp, i)));
    // The order tp, dp, cp, and its reverse.
    CHECK(at::equal(indices_of(size, {dp, cp, tp}, {i, k, j}, {StridedShard{0, tp}, StridedShard{0, tp}, Shard{0}}),
                    chunk_of(chunk_of(of_tp, dp, i), cp, k)));
    const std::vector<Placement> reverse = {StridedShard{0, dp * tp}, StridedShard{0, tp}, Shard{0}};
    CHECK(at::equal(indices_of(size, {cp, dp, tp}, {k, i, j}, reverse), chunk_of(chunk_of(of_tp, dp, i), cp, k)));
    // Alone: the i-th part of each of the chunks.
    const int64_t stripes = draw.between(1, 5);
    std::vector<at::Tensor> parts;
    for (const at::Tensor& stripe : whole.chunk(stripes)) parts.push_back(chunk_of(stripe, dp, i));
    CHECK(at::equal(indices_of(size, {dp}, {i}, {StridedShard{0, stripes}}), torch::cat(parts)));
  }
}

TEST_CASE("every element is held once in each replica, and told in the order it is held", "[tensor][local_piece]") {
  const uint64_t seed = draw_seed();
  INFO("FSDP_TEST_SEED=" << seed);
  Draw draw(seed);
  for (int repeat = 0; repeat < 400; ++repeat) {
    const Sizes shape = draw.one_of(kMeshShapes), sizes = draw.sizes(0, 3, 7);
    const at::Tensor whole = torch::empty(sizes, torch::kMeta);
    const auto placements = draw_cuts(draw, whole.dim(), shape);
    INFO(describe(whole, placements) << " on a mesh of " << c10::IntArrayRef(shape));
    int64_t copies = 1;
    MeshDims all;
    for (size_t m = 0; m < shape.size(); ++m) {
      all.set(m);
      if (std::holds_alternative<Replicate>(placements[m])) copies *= shape[m];
    }
    at::Tensor held = torch::zeros({whole.numel()}, torch::kLong);
    for_each_rank(Sizes(shape.size(), 0), shape, all, [&](const Sizes& coordinates) {
      int64_t last = -1, numel = 0;
      for (const ElementRange& range : element_ranges(sizes, shape, coordinates, placements)) {
        REQUIRE(range.begin > last);  // ascending, and adjacent ones are joined
        REQUIRE(range.end > range.begin);
        last = range.end;
        numel += range.count();
        held.narrow(0, range.begin, range.count()).add_(1);
      }
      REQUIRE(numel == c10::multiply_integers(local_piece(sizes, shape, coordinates, placements).sizes));
      return true;
    });
    CHECK(at::equal(held, torch::full({whole.numel()}, copies, torch::kLong)));
  }
}

TEST_CASE("element ranges read the local tensor row-major", "[tensor][local_piece]") {
  const auto ranges_of = [](const DTensor& tensor) { return tensor.element_ranges(); };
  const auto mesh = [](int rank) { return mesh_of(SplitLog::world(rank, 2), {2}); };
  const at::Tensor whole = torch::arange(20).reshape({4, 5});
  CHECK(ranges_of(distribute_tensor(whole, mesh(1), {Shard{0}})) == std::vector<ElementRange>{{10, 20}});
  CHECK(ranges_of(distribute_tensor(whole, mesh(1), {Shard{1}})) ==
        std::vector<ElementRange>{{3, 5}, {8, 10}, {13, 15}, {18, 20}});
  CHECK(ranges_of(distribute_tensor(whole, mesh(0), {StridedShard{0, 2}})) ==
        std::vector<ElementRange>{{0, 5}, {10, 15}});
  CHECK(ranges_of(distribute_tensor(whole, mesh(0), {Replicate{}})) == std::vector<ElementRange>{{0, 20}});
  CHECK(ranges_of(distribute_tensor(torch::tensor(1.0), mesh(0), {Shard{0}})) == std::vector<ElementRange>{{0, 1}});
  CHECK(ranges_of(distribute_tensor(torch::tensor(1.0), mesh(1), {Shard{0}})).empty());

  const uint64_t seed = draw_seed();
  INFO("FSDP_TEST_SEED=" << seed);
  Draw draw(seed);
  for (int repeat = 0; repeat < 200; ++repeat) {
    const Sizes shape = draw.one_of(kMeshShapes), sizes = draw.sizes(0, 3, 7);
    const auto world_size = static_cast<int>(c10::multiply_integers(shape));
    const auto rank = static_cast<int>(draw.between(0, world_size - 1));
    const DeviceMesh any = mesh_of(SplitLog::world(rank, world_size), shape);
    const at::Tensor numbers = torch::arange(c10::multiply_integers(sizes)).reshape(sizes);
    const DTensor tensor = distribute_tensor(numbers, any, draw_cuts(draw, numbers.dim(), shape));
    std::vector<at::Tensor> parts = {torch::empty({0}, torch::kLong)};
    for (const ElementRange& range : tensor.element_ranges()) parts.push_back(torch::arange(range.begin, range.end));
    CHECK(at::equal(torch::cat(parts), tensor.to_local().reshape({-1})));
  }
}

TEST_CASE("a 0-dim tensor is held by the first rank alone", "[tensor][local_piece]") {
  const std::vector<Placement> both = {Shard{0}, Shard{0}};
  CHECK(local_piece({}, {2, 2}, {0, 0}, both).sizes.empty());
  CHECK(local_piece({}, {2, 2}, {0, 1}, both).sizes == Sizes{0});
  CHECK(local_piece({}, {2, 2}, {1, 0}, both).sizes == Sizes{0});
  CHECK(local_piece({}, {2, 2}, {1, 1}, both).indices.empty());
  CHECK(local_piece({}, {2}, {0}, {StridedShard{0, 3}}).sizes.empty());
  CHECK(local_piece({}, {2}, {1}, {StridedShard{0, 3}}).sizes == Sizes{0});
}

TEST_CASE("negative dimensions count from the end", "[tensor][local_piece]") {
  const DeviceMesh mesh = silent_mesh({2, 2});
  const std::vector<Placement> expected = {Shard{2}, Replicate{}};
  CHECK(normalised({Shard{-1}, Replicate{}}, mesh, 3, "test") == expected);
  CHECK(normalised({Shard{-1}, Shard{0}}, mesh, 0, "test") == std::vector<Placement>{Shard{0}, Shard{0}});
  CHECK(normalised({StridedShard{-2, 2}, Shard{0}}, mesh, 2, "test") ==
        std::vector<Placement>{StridedShard{0, 2}, Shard{0}});
}

TEST_CASE("placements that do not fit the mesh or the tensor are refused by name", "[tensor][local_piece]") {
  using Catch::Contains;
  const DeviceMesh mesh = silent_mesh({2, 2});
  CHECK_THAT(error_of<UsageError>([&] { normalised({Shard{0}}, mesh, 2, "from_local"); }),
             Contains("from_local") && Contains("one placement for each dimension") &&
                 Contains("DeviceMesh(cpu, a=2, b=2)") && Contains("got 1: (Shard(0))"));
  CHECK_THAT(error_of<UsageError>([&] { normalised({Replicate{}, Shard{2}}, mesh, 2, "from_local"); }),
             Contains("Shard(2)") && Contains("2 dimension(s)") && Contains("[-2, 2)"));
  CHECK_THAT(error_of<UsageError>([&] { normalised({Replicate{}, Shard{-3}}, mesh, 2, "from_local"); }),
             Contains("Shard(-3)"));
  CHECK_THAT(error_of<UsageError>([&] { normalised({Replicate{}, Shard{1}}, mesh, 0, "from_local"); }),
             Contains("0 dimension(s)") && Contains("[-1, 1)"));
  CHECK_THAT(error_of<UsageError>([&] { normalised({StridedShard{2, 2}, Shard{0}}, mesh, 2, "from_local"); }),
             Contains("StridedShard(dim=2, split_factor=2)") && Contains("[-2, 2)"));
  CHECK_THAT(error_of<UsageError>([&] { normalised({StridedShard{0, 0}, Shard{0}}, mesh, 2, "from_local"); }),
             Contains("split factor of 1 at least") && Contains("got StridedShard(dim=0, split_factor=0)"));
  CHECK_THAT(error_of<UsageError>(
                 [&] { normalised({Partial{}, Partial{ReduceOp::kMax}}, mesh, 2, "from_local"); }),
             Contains("one operation") && Contains("(Partial(sum), Partial(max))"));
}

}  // namespace fsdp::test
