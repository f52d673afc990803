#include <catch2/catch.hpp>

#include <functional>
#include <numeric>

#include "fsdp/error.hpp"
#include "mesh/mesh_init.hpp"
#include "support/split_log.hpp"
#include "support/error_of.hpp"
#include "support/ranks.hpp"

namespace fsdp::test {
namespace {

using Catch::Contains;
using Names = std::vector<std::string>;

LaunchEnvironment node_rank(int rank, int world_size, int local_rank, int local_world_size) {
  return {.rank = rank, .world_size = world_size, .local_rank = local_rank,
          .local_world_size = local_world_size, .launcher = "torchrun"};
}

}  // namespace

TEST_CASE("all ranks make all groups in one order, members or not", "[mesh][mesh_init]") {
  const SplitLog::Log expected = {"world: replicate[0,3]", "world: replicate[1,4]", "world: replicate[2,5]",
                                  "world: shard[0,1,2]", "world: shard[3,4,5]"};
  for (int rank = 0; rank < 8; ++rank) {
    const auto world = SplitLog::world(rank, 8);
    const DeviceMesh mesh = init_device_mesh(world, {2, 3}, {"replicate", "shard"}, {.ranks = {0, 1, 2, 3, 4, 5}});
    CHECK(world->splits() == expected);
    CHECK(mesh.is_member() == (rank < 6));
  }
}

TEST_CASE("a dimension over the whole world in order reuses the world", "[mesh][mesh_init]") {
  const auto world = SplitLog::world(1, 4);
  CHECK(init_device_mesh(world, {4}).get_group() == world);
  CHECK(init_device_mesh(world, {1, 4}, {"replicate", "shard"}).get_group("shard") == world);
  CHECK(world->splits().empty());

  const DeviceMesh turned = init_device_mesh(world, {4}, {"shard"}, {.ranks = {3, 2, 1, 0}});
  CHECK(turned.get_group() != world);
  CHECK(turned.get_local_rank() == 2);
  CHECK(turned.get_group()->ranks() == std::vector<int>{3, 2, 1, 0});
  CHECK(world->splits() == SplitLog::Log{"world: shard[3,2,1,0]"});
}

TEST_CASE("a dimension of one rank needs no group and no communication", "[mesh][mesh_init]") {
  for (int rank = 0; rank < 4; ++rank) {
    const auto world = SplitLog::world(rank, 4);
    const DeviceMesh mesh = init_device_mesh(world, {4, 1}, {"replicate", "shard"});
    CHECK(world->splits().empty());
    CHECK(mesh.get_group("replicate") == world);
    CHECK(mesh.get_group("shard")->size() == 1);
    CHECK(mesh.get_coordinate() == std::vector<int64_t>{rank, 0});
  }
}

TEST_CASE("a wrong mesh is refused before any group is made", "[mesh][mesh_init]") {
  const auto world = SplitLog::world(0, 4);
  const auto message = [&](std::vector<int64_t> shape, Names names = {}, std::vector<int> ranks = {}) {
    return error_of<UsageError>(
        [&] { init_device_mesh(world, shape, names, {.ranks = std::move(ranks)}); });
  };
  // Subject, expectation, finding, way out.
  CHECK_THAT(message({3}), Contains("shape (3)") && Contains("3 rank(s)") && Contains("size of the world is 4") &&
                               Contains("DeviceMeshOptions::ranks"));
  CHECK_THAT(message({2, 2}, {"a", "b"}, {0, 1, 2}), Contains("shape (2, 2)") && Contains("4 rank(s)") &&
                                                         Contains("number of ranks given is 3"));
  CHECK_THAT(message({2}, {}, {1, 1}), Contains("each rank may appear once") && Contains("1 twice in (1, 1)"));
  CHECK_THAT(message({2}, {}, {0, 4}), Contains("world of 4") && Contains("0 to 3") && Contains("got 4"));
  CHECK_THAT(message({2}, {}, {0, -1}), Contains("got -1"));
  CHECK_THAT(message({2, 2}), Contains("2 dimension name(s)") && Contains("got 0"));
  CHECK_THAT(message({2, 2}, {"a"}), Contains("2 dimension name(s)") && Contains("got 1"));
  CHECK_THAT(message({4}, {"a", "b"}), Contains("1 dimension name(s)") && Contains("got 2"));
  CHECK_THAT(message({2, 2}, {"dp", "dp"}), Contains("must differ") && Contains("\"dp\" twice") && Contains("rename"));
  CHECK_THAT(message({2, 2}, {"dp", ""}), Contains("must not be empty"));
  CHECK_THAT(message({}), Contains("at least one dimension"));
  CHECK_THAT(message({4, 0}, {"a", "b"}), Contains("at least 1") && Contains("(4, 0)"));
  CHECK_THAT(message({-4}), Contains("at least 1") && Contains("(-4)"));
  CHECK_THAT(error_of<UsageError>([] { init_device_mesh(nullptr, {1}); }),
             Contains("got null") && Contains("init_process_group"));
  CHECK(world->splits().empty());
}

TEST_CASE("one existing group gives a 1-D mesh", "[mesh][mesh_init]") {
  const auto world = SplitLog::world(2, 4);
  const auto group = world->split(std::vector<int>{0, 2}, "mine");
  const DeviceMesh mesh = DeviceMesh::from_group({group}, {"shard"});
  CHECK(mesh.to_string() == "DeviceMesh(cpu, shard=2)");
  CHECK(mesh.ranks() == std::vector<int>{0, 2});
  CHECK(mesh.get_coordinate() == std::vector<int64_t>{1});
  CHECK(mesh.get_group() == group);
  CHECK(DeviceMesh::from_group({group}).dim_names().empty());
}

TEST_CASE("(shard, replicate) groups give the mesh that has them", "[mesh][mesh_init]") {
  for (const auto& [replicate, shard] : std::vector<std::pair<int64_t, int64_t>>{{2, 3}, {3, 2}, {1, 6}, {6, 1}})
    for (int rank = 0; rank < 6; ++rank) {
      const auto world = SplitLog::world(rank, 6);
      const DeviceMesh made = init_device_mesh(world, {replicate, shard}, {"replicate", "shard"});
      const size_t splits_before = world->splits().size();
      const DeviceMesh mesh = DeviceMesh::from_group({made.get_group("shard"), made.get_group("replicate")});
      CHECK(mesh == made);
      CHECK(mesh.get_coordinate() == made.get_coordinate());
      CHECK(mesh.get_group("shard") == made.get_group("shard"));
      CHECK(mesh.get_group("replicate") == made.get_group("replicate"));
      CHECK(world->splits().size() == splits_before);
    }
}

TEST_CASE("the groups of any number of dimensions give the mesh that has them", "[mesh][mesh_init]") {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{2, 3, 2}, {1, 3, 2}, {3, 1, 2}, {2, 2, 2, 2}, {1, 1, 4}}) {
    const int size = static_cast<int>(std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()));
    Names names = {"pp", "dp", "cp", "tp"};
    names.resize(shape.size());
    for (int rank = 0; rank < size; ++rank) {
      const DeviceMesh made = init_device_mesh(SplitLog::world(rank, size), shape, names);
      std::vector<std::shared_ptr<Communicator>> groups;
      for (int dim = 0; dim < made.ndim(); ++dim) groups.push_back(made.get_group(dim));
      const DeviceMesh mesh = mesh_of_groups(groups, names);
      CHECK(mesh == made);
      CHECK(mesh.get_coordinate() == made.get_coordinate());
      CHECK(mesh.submesh({names.back()}) == made.submesh({names.back()}));
    }
  }
}

TEST_CASE("groups that do not make a mesh are refused", "[mesh][mesh_init]") {
  const auto world = SplitLog::world(0, 4);
  const auto group = world->split(std::vector<int>{0, 1}, "a");
  const auto elsewhere = SplitLog::world(2, 4)->split(std::vector<int>{2, 3}, "b");
  const auto message = [](std::vector<std::shared_ptr<Communicator>> groups, Names names = {}) {
    return error_of<UsageError>([&] { DeviceMesh::from_group(groups, names); });
  };
  CHECK_THAT(message({}), Contains("(shard, replicate)") && Contains("got 0 groups"));
  CHECK_THAT(message({group, group, group}), Contains("got 3 groups") && Contains("init_device_mesh"));
  CHECK_THAT(message({nullptr}), Contains("got null"));
  CHECK_THAT(message({group, elsewhere}),
             Contains("meet in this rank") && Contains("rank 0") && Contains("a[0,1]") && Contains("rank 2") &&
                 Contains("b[2,3]") && Contains("one world"));
  CHECK_THAT(message({world, group}), Contains("share more than this rank") && Contains("world") && Contains("a[0,1]"));
  CHECK_THAT(message({group}, {"a", "b"}), Contains("1 dimension name(s)"));
}

TEST_CASE("a hybrid mesh shards within a node and replicates across nodes", "[mesh][mesh_init]") {
  on_ranks(6, [](Rank& rank) {
    const DeviceMesh mesh = hybrid_mesh_for(rank.world(), node_rank(rank.index(), 6, rank.index() % 3, 3));
    rank.check(mesh.to_string() == "DeviceMesh(cpu, replicate=2, shard=3)", mesh.to_string());
    rank.check_equal(mesh.get_coordinate(), std::vector<int64_t>{rank.index() / 3, rank.index() % 3}, "coordinates");
    rank.check_equal(rank.calls(), Names{"all_gather hybrid mesh"}, "calls");
  });
}

TEST_CASE("one node is sharded whole, nodes of one rank replicate", "[mesh][mesh_init]") {
  on_ranks(4, [](Rank& rank) {
    const DeviceMesh one_node = hybrid_mesh_for(rank.world(), node_rank(rank.index(), 4, rank.index(), 4));
    rank.check_equal(one_node.shape(), std::vector<int64_t>{1, 4}, "one node");
    const DeviceMesh lone_ranks = hybrid_mesh_for(rank.world(), node_rank(rank.index(), 4, 0, 1));
    rank.check_equal(lone_ranks.shape(), std::vector<int64_t>{4, 1}, "nodes of one rank");
  });
}

TEST_CASE("without a launcher the public hybrid_mesh takes every rank for a node", "[mesh][mesh_init]") {
  on_ranks(2, [](Rank& rank) {
    if (launch_environment().launcher != "none") return rank.check(true, "started by a launcher: not this case");
    rank.check_equal(hybrid_mesh(rank.world()).shape(), std::vector<int64_t>{2, 1}, "shape");
  });
}

TEST_CASE("unequal nodes are refused on every rank", "[mesh][mesh_init]") {
  on_ranks(6, [](Rank& rank) {
    const bool first = rank.index() < 4;
    const auto launch = node_rank(rank.index(), 6, first ? rank.index() : rank.index() - 4, first ? 4 : 2);
    rank.check_throws<UsageError>([&] { hybrid_mesh_for(rank.world(), launch); },
                                  {"hybrid mesh", "same number of ranks", "4, 4, 4, 4, 2, 2", "init_device_mesh"},
                                  "unequal nodes");
  });
}

TEST_CASE("ranks dealt out to the nodes in turn are refused on every rank", "[mesh][mesh_init]") {
  on_ranks(4, [](Rank& rank) {
    rank.check_throws<UsageError>(
        [&] { hybrid_mesh_for(rank.world(), node_rank(rank.index(), 4, rank.index() / 2, 2)); },
        {"node by node", "0, 0, 1, 1", "init_device_mesh"}, "ranks in turn");
  });
}

}  // namespace fsdp::test
