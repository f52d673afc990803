#include <catch2/catch.hpp>

#include "fsdp/error.hpp"
#include "printed.hpp"
#include "split_log.hpp"
#include "tensor/local_piece.hpp"

namespace fsdp::test {
namespace {

using Sizes = std::vector<int64_t>;

DeviceMesh mesh_of(const Sizes& shape, const std::vector<std::string>& names) {
  return init_device_mesh(SplitLog::world(0, static_cast<int>(c10::multiply_integers(shape))), shape, names);
}

}  // namespace

TEST_CASE("a piece has the rows of its rank and says where they start", "[tensor][local_piece]") {
  const LocalPiece piece = local_piece({5, 3}, {4}, {2}, {Shard{0}});
  CHECK(piece.sizes == Sizes{1, 3});
  CHECK(piece.offsets == Sizes{4, 0});
  CHECK(local_piece({5, 3}, {4}, {3}, {Shard{0}}).sizes == Sizes{0, 3});
  CHECK(local_piece({5, 3}, {4}, {3}, {Shard{0}}).offsets == Sizes{5, 0});
}

TEST_CASE("two mesh dimensions may cut two tensor dimensions", "[tensor][local_piece]") {
  const LocalPiece piece = local_piece({4, 5}, {2, 3}, {1, 2}, {Shard{0}, Shard{1}});
  CHECK(piece.sizes == Sizes{2, 1});
  CHECK(piece.offsets == Sizes{2, 4});
}

TEST_CASE("the second Shard of a dimension cuts what the first one left", "[tensor][local_piece]") {
  // 7 rows: mesh row 0 has 0..3, which are cut in 2, 2 and 0; mesh row 1 has 4..6, cut in 1, 1 and 1.
  const std::vector<Placement> both = {Shard{0}, Shard{0}};
  CHECK(local_piece({7}, {2, 3}, {0, 1}, both).sizes == Sizes{2});
  CHECK(local_piece({7}, {2, 3}, {0, 1}, both).offsets == Sizes{2});
  CHECK(local_piece({7}, {2, 3}, {0, 2}, both).sizes == Sizes{0});
  CHECK(local_piece({7}, {2, 3}, {1, 2}, both).sizes == Sizes{1});
  CHECK(local_piece({7}, {2, 3}, {1, 2}, both).offsets == Sizes{6});
}

TEST_CASE("Replicate and Partial pieces have the whole size", "[tensor][local_piece]") {
  const LocalPiece piece = local_piece({5, 3}, {2, 2}, {1, 1}, {Partial{}, Replicate{}});
  CHECK(piece.sizes == Sizes{5, 3});
  CHECK(piece.offsets == Sizes{0, 0});
}

TEST_CASE("a 0-dim tensor is held by the first rank alone", "[tensor][local_piece]") {
  const std::vector<Placement> both = {Shard{0}, Shard{0}};
  CHECK(local_piece({}, {2, 2}, {0, 0}, both).sizes.empty());
  CHECK(local_piece({}, {2, 2}, {0, 1}, both).sizes == Sizes{0});
  CHECK(local_piece({}, {2, 2}, {1, 0}, both).sizes == Sizes{0});
  CHECK(local_piece({}, {2, 2}, {1, 1}, both).offsets.empty());
}

TEST_CASE("negative dimensions count from the end", "[tensor][local_piece]") {
  const DeviceMesh mesh = mesh_of({2, 2}, {"a", "b"});
  const std::vector<Placement> expected = {Shard{2}, Replicate{}};
  CHECK(normalised({Shard{-1}, Replicate{}}, mesh, 3, "test") == expected);
  CHECK(normalised({Shard{-1}, Shard{0}}, mesh, 0, "test") == std::vector<Placement>{Shard{0}, Shard{0}});
}

TEST_CASE("placements that do not fit the mesh or the tensor are refused by name", "[tensor][local_piece]") {
  using Catch::Contains;
  const DeviceMesh mesh = mesh_of({2, 2}, {"a", "b"});
  CHECK_THAT(message_of<UsageError>([&] { normalised({Shard{0}}, mesh, 2, "from_local"); }),
             Contains("from_local") && Contains("one placement for each dimension") &&
                 Contains("DeviceMesh(cpu, a=2, b=2)") && Contains("got 1: (Shard(0))"));
  CHECK_THAT(message_of<UsageError>([&] { normalised({Replicate{}, Shard{2}}, mesh, 2, "from_local"); }),
             Contains("Shard(2)") && Contains("2 dimension(s)") && Contains("[-2, 2)"));
  CHECK_THAT(message_of<UsageError>([&] { normalised({Replicate{}, Shard{-3}}, mesh, 2, "from_local"); }),
             Contains("Shard(-3)"));
  CHECK_THAT(message_of<UsageError>([&] { normalised({Replicate{}, Shard{1}}, mesh, 0, "from_local"); }),
             Contains("0 dimension(s)") && Contains("[-1, 1)"));
}

}  // namespace fsdp::test
