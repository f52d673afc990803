#include <catch2/catch.hpp>

#include "fsdp/placement.hpp"
#include "support/printed.hpp"

namespace fsdp::test {

TEST_CASE("placements are written as in Python", "[tensor][placement]") {
  CHECK(to_string(Placement(Shard{1})) == "Shard(1)");
  CHECK(to_string(Placement(StridedShard{0, 2})) == "StridedShard(dim=0, split_factor=2)");
  CHECK(to_string(Placement(Replicate{})) == "Replicate()");
  CHECK(to_string(Placement(Partial{})) == "Partial(sum)");
  CHECK(to_string(Placement(Partial{ReduceOp::kMax})) == "Partial(max)");
  CHECK(to_string(Placement(Partial{ReduceOp::kMin})) == "Partial(min)");
  CHECK(to_string(std::vector<Placement>{Replicate{}, Shard{0}}) == "(Replicate(), Shard(0))");
  CHECK(to_string(std::vector<Placement>{}) == "()");
}

TEST_CASE("placements differ in kind, dimension and operation", "[tensor][placement]") {
  CHECK(Placement(Shard{0}) == Placement(Shard{0}));
  CHECK(Placement(Shard{0}) != Placement(Shard{1}));
  CHECK(Placement(Shard{0}) != Placement(Replicate{}));
  CHECK(Placement(StridedShard{0, 2}) == Placement(StridedShard{0, 2}));
  CHECK(Placement(StridedShard{0, 2}) != Placement(StridedShard{0, 4}));
  CHECK(Placement(StridedShard{0, 1}) != Placement(Shard{0}));
  CHECK(Placement(Partial{}) != Placement(Partial{ReduceOp::kMax}));
}

}  // namespace fsdp::test
