#include <catch2/catch.hpp>

#include "fsdp/error.hpp"
#include "support/logged_lines.hpp"
#include "mesh/mesh_info.hpp"
#include "support/printed.hpp"
#include "support/split_log.hpp"
#include "support/error_of.hpp"
#include "support/ranks.hpp"
#include "support/scoped_environment.hpp"

namespace fsdp::test {
namespace {

using Catch::Contains;

MeshInfo sharded_over(const std::shared_ptr<Communicator>& world) {
  return make_mesh_info(init_device_mesh(world, {world->size()}, {"shard"}), MeshUse::kShard);
}

MeshInfo hybrid_over(const std::shared_ptr<Communicator>& world, int64_t replicate) {
  return make_mesh_info(
      init_device_mesh(world, {replicate, world->size() / replicate}, {"replicate", "shard"}), MeshUse::kShard);
}

}  // namespace

TEST_CASE("one dimension shards", "[mesh][mesh_info]") {
  const auto world = SplitLog::world(2, 4);
  const MeshInfo info = sharded_over(world);
  CHECK(info.shard_group == world);
  CHECK(info.replicate_group == nullptr);
  CHECK(info.shard_size() == 4);
  CHECK(info.shard_rank() == 2);
  CHECK(info.replicate_size() == 1);
  CHECK(info.replicate_rank() == 0);
  CHECK(info.data_parallel_size() == 4);
  CHECK(info.placements() == std::vector<Placement>{Shard{0}});
}

TEST_CASE("of two dimensions the first replicates and the second shards", "[mesh][mesh_info]") {
  const MeshInfo info = hybrid_over(SplitLog::world(4, 6), 2);
  CHECK(info.shard_size() == 3);
  CHECK(info.shard_rank() == 1);
  CHECK(info.replicate_size() == 2);
  CHECK(info.replicate_rank() == 1);
  CHECK(info.data_parallel_size() == 6);
  CHECK(info.placements() == std::vector<Placement>{Replicate{}, Shard{0}});
}

TEST_CASE("replicating alone shards over one rank", "[mesh][mesh_info]") {
  const auto world = SplitLog::world(2, 4);
  const MeshInfo info = make_mesh_info(init_device_mesh(world, {4}), MeshUse::kReplicateOnly);
  CHECK(info.replicate_group == world);
  CHECK(info.shard_size() == 1);
  CHECK(info.shard_rank() == 0);
  CHECK(info.data_parallel_size() == 4);
  CHECK(info.placements() == std::vector<Placement>{Replicate{}});
  CHECK(world->splits().empty());
}

TEST_CASE("meshes with other dimensions are refused with the way out", "[mesh][mesh_info]") {
  const auto world = SplitLog::world(0, 8);
  const DeviceMesh three = init_device_mesh(world, {2, 2, 2}, {"pp", "replicate", "shard"});
  CHECK_THAT(error_of<UsageError>([&] { make_mesh_info(three, MeshUse::kShard); }),
             Contains("DeviceMesh(cpu, pp=2, replicate=2, shard=2)") && Contains("one dimension (shard) or two") &&
                 Contains("got 3") && Contains("mesh.submesh({...})"));
  const DeviceMesh two = three.submesh({"replicate", "shard"});
  CHECK_THAT(error_of<UsageError>([&] { make_mesh_info(two, MeshUse::kReplicateOnly); }),
             Contains("takes one dimension") && Contains("got 2") && Contains("flatten"));
  CHECK_THAT(error_of<UsageError>([] { make_mesh_info(DeviceMesh(), MeshUse::kShard); }), Contains("undefined"));
  CHECK(make_mesh_info(two, MeshUse::kShard).shard_size() == 2);
}

TEST_CASE("a rank outside of the mesh has no part in it", "[mesh][mesh_info]") {
  const DeviceMesh mesh = init_device_mesh(SplitLog::world(3, 4), {2}, {"shard"}, {.ranks = {0, 1}});
  CHECK_THAT(error_of<StateError>([&] { make_mesh_info(mesh, MeshUse::kShard); }), Contains("is_member()"));
}

TEST_CASE("an integer reshard of n groups n ranks that follow each other", "[mesh][mesh_info]") {
  for (int rank = 0; rank < 8; ++rank) {
    const auto world = SplitLog::world(rank, 8);
    const ReshardPlan plan = make_reshard_plan(sharded_over(world), 2);
    CHECK(plan.reshard);
    CHECK(plan.ranks == 2);
    REQUIRE(plan.post_forward_group);
    CHECK(plan.post_forward_group->ranks() == std::vector<int>{rank / 2 * 2, rank / 2 * 2 + 1});
    CHECK(plan.post_forward_group->rank() == rank % 2);
    CHECK(world->splits() == SplitLog::Log{"world: post_forward[0,1]", "world: post_forward[2,3]",
                                           "world: post_forward[4,5]", "world: post_forward[6,7]"});
  }
}

TEST_CASE("each replica splits its own shard group", "[mesh][mesh_info]") {
  for (int rank = 0; rank < 8; ++rank) {
    const auto world = SplitLog::world(rank, 8);
    const ReshardPlan plan = make_reshard_plan(hybrid_over(world, 2), 2);
    REQUIRE(plan.post_forward_group);
    CHECK(plan.post_forward_group->ranks() == std::vector<int>{rank / 2 * 2, rank / 2 * 2 + 1});
    const SplitLog::Log& splits = world->splits();
    const SplitLog::Log last_two(splits.end() - 2, splits.end());
    CHECK(last_two == (rank < 4 ? SplitLog::Log{"shard[0,1,2,3]: post_forward[0,1]", "shard[0,1,2,3]: post_forward[2,3]"}
                                : SplitLog::Log{"shard[4,5,6,7]: post_forward[4,5]",
                                                "shard[4,5,6,7]: post_forward[6,7]"}));
  }
}

TEST_CASE("the shard size means a full reshard and makes no group", "[mesh][mesh_info]") {
  const auto world = SplitLog::world(0, 6);
  const ReshardPlan plan = make_reshard_plan(sharded_over(world), 6);
  CHECK(plan.reshard);
  CHECK(plan.ranks == 6);
  CHECK(plan.post_forward_group == nullptr);
  CHECK(world->splits().empty());
}

TEST_CASE("1 means false, makes no group, and is warned about once", "[mesh][mesh_info]") {
  const LoggedLines logged;
  const auto world = SplitLog::world(0, 6);
  for (int repeat = 0; repeat < 2; ++repeat) {
    const ReshardPlan plan = make_reshard_plan(sharded_over(world), 1);
    CHECK_FALSE(plan.reshard);
    CHECK(plan.ranks == 1);
    CHECK(plan.post_forward_group == nullptr);
  }
  CHECK(world->splits().empty());
  CHECK(logged.count("reshard_after_forward: 1 keeps the parameters unsharded") == 1);
}

TEST_CASE("an integer that does not divide the shard size is refused, naming those that do",
          "[mesh][mesh_info]") {
  const auto world = SplitLog::world(0, 12);
  const MeshInfo info = sharded_over(world);
  for (const int64_t ranks : {-1, 0, 5, 7, 8, 13, 24})
    CHECK_THAT(error_of<UsageError>([&] { make_reshard_plan(info, ranks); }),
               Contains("reshard_after_forward") && Contains("shard size 12") &&
                   Contains(fmt::format("got {};", ranks)) && Contains("1, 2, 3, 4, 6, 12"));
  // The replicas do not count.
  CHECK_THAT(error_of<UsageError>([&] { make_reshard_plan(hybrid_over(SplitLog::world(0, 12), 2), 4); }),
             Contains("shard size 6") && Contains("1, 2, 3, 6"));
  CHECK(world->splits().empty());
}

TEST_CASE("every divisor is accepted, and nothing else", "[mesh][mesh_info]") {
  for (int world_size = 2; world_size <= 8; ++world_size)
    for (int64_t ranks = 2; ranks <= world_size + 1; ++ranks) {
      const MeshInfo info = sharded_over(SplitLog::world(0, world_size));
      if (world_size % ranks != 0) {
        CHECK_THROWS_AS(make_reshard_plan(info, ranks), UsageError);
        continue;
      }
      const ReshardPlan plan = make_reshard_plan(info, ranks);
      CHECK(plan.reshard);
      CHECK((plan.post_forward_group != nullptr) == (ranks < world_size));
    }
}

TEST_CASE("the same request reuses the groups, also on a sub-mesh", "[mesh][mesh_info]") {
  const auto world = SplitLog::world(0, 8);
  const DeviceMesh mesh = init_device_mesh(world, {2, 4}, {"replicate", "shard"});
  const ReshardPlan first = make_reshard_plan(make_mesh_info(mesh, MeshUse::kShard), 2);
  const size_t splits_before = world->splits().size();
  const DeviceMesh copy = mesh;
  CHECK(make_reshard_plan(make_mesh_info(copy, MeshUse::kShard), 2).post_forward_group == first.post_forward_group);
  CHECK(make_reshard_plan(make_mesh_info(mesh["shard"], MeshUse::kShard), 2).post_forward_group ==
        first.post_forward_group);
  CHECK(world->splits().size() == splits_before);
}

TEST_CASE("post-forward groups gather among their own ranks", "[mesh][mesh_info]") {
  on_ranks(8, [](Rank& rank) {
    const MeshInfo info = make_mesh_info(rank.hybrid(2, 4), MeshUse::kShard);
    const ReshardPlan plan = make_reshard_plan(info, 2);
    const at::Tensor all = torch::empty({2}, torch::kLong);
    plan.post_forward_group->start_all_gather(all, torch::tensor({int64_t{rank.index()}}), "ranks")->wait();
    const int first = rank.index() / 2 * 2;
    rank.check_identical(all, torch::tensor({int64_t{first}, int64_t{first + 1}}), "members");
  });
}

TEST_CASE("modules on one mesh share the group that leaves collectives out", "[mesh][mesh_info]") {
  const ScopedEnvironment set(Variables{{"FSDP_FAKE_ALL_GATHER", "1"}});
  const auto world = SplitLog::world(0, 4);
  const auto mesh = init_device_mesh(world, {4}, {"shard"});
  const auto group = make_mesh_info(mesh, MeshUse::kShard).shard_group;
  CHECK(group != world);
  CHECK(make_mesh_info(mesh, MeshUse::kShard).shard_group == group);
}

}  // namespace fsdp::test
