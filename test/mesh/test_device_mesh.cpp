#include <catch2/catch.hpp>

#include "fsdp/device_mesh.hpp"
#include "fsdp/error.hpp"
#include "support/split_log.hpp"
#include "support/error_of.hpp"
#include "support/ranks.hpp"

namespace fsdp::test {
namespace {

using Catch::Contains;
using Names = std::vector<std::string>;
using Coordinates = std::vector<int64_t>;

DeviceMesh three_dims(const std::shared_ptr<Communicator>& world) {
  return init_device_mesh(world, {2, 2, 2}, {"pp", "replicate", "shard"});
}

}  // namespace

TEST_CASE("a mesh knows its shape, names, ranks and this rank's place", "[mesh][device_mesh]") {
  const DeviceMesh mesh = init_device_mesh(SplitLog::world(4, 6), {2, 3}, {"replicate", "shard"});
  CHECK(mesh.defined());
  CHECK(mesh.device_type() == c10::kCPU);
  CHECK(mesh.ndim() == 2);
  CHECK(mesh.shape() == std::vector<int64_t>{2, 3});
  CHECK(mesh.size() == 6);
  CHECK(mesh.size(1) == 3);
  CHECK(mesh.dim_names() == Names{"replicate", "shard"});
  CHECK(mesh.dim("shard") == 1);
  CHECK(mesh.ranks() == std::vector<int>{0, 1, 2, 3, 4, 5});
  CHECK(mesh.get_coordinate() == Coordinates{1, 1});
  CHECK(mesh.get_local_rank() == 1);
  CHECK(mesh.get_local_rank(1) == 1);
  CHECK(mesh.get_group("shard")->ranks() == std::vector<int>{3, 4, 5});
  CHECK(mesh.get_group(0)->ranks() == std::vector<int>{1, 4});
}

TEST_CASE("meshes are written with their names and sizes", "[mesh][device_mesh]") {
  CHECK(init_device_mesh(SplitLog::world(0, 8), {2, 4}, {"replicate", "shard"}).to_string() ==
        "DeviceMesh(cpu, replicate=2, shard=4)");
  CHECK(init_device_mesh(SplitLog::world(0, 4), {4}).to_string() == "DeviceMesh(cpu, 4)");
  CHECK(DeviceMesh().to_string() == "DeviceMesh(undefined)");
}

TEST_CASE("the groups of a mesh are those of its rows and columns", "[mesh][device_mesh]") {
  for (const auto& [rows, columns] : std::vector<std::pair<int, int>>{{2, 2}, {2, 3}, {1, 4}, {4, 1}, {2, 4}})
    on_ranks(rows * columns, [rows = rows, columns = columns](Rank& rank) {
      const DeviceMesh mesh = rank.hybrid(rows, columns);
      const int row = rank.index() / columns, column = rank.index() % columns;
      rank.check_equal(mesh.get_coordinate(), Coordinates{row, column}, "coordinates");
      rank.check_equal(mesh.get_group(0)->size(), rows, "column size");
      rank.check_equal(mesh.get_group(1)->size(), columns, "row size");
      // Each group gathers the ranks of its members.
      const at::Tensor own = torch::tensor({int64_t{rank.index()}});
      for (int dim = 0; dim < 2; ++dim) {
        const at::Tensor all = torch::empty({mesh.size(dim)}, torch::kLong);
        mesh.get_group(dim)->start_all_gather(all, own, "ranks")->wait();
        const at::Tensor expected = dim == 0 ? torch::arange(rows) * columns + column
                                             : torch::arange(columns) + row * columns;
        rank.check_identical(all, expected, fmt::format("members of dimension {}", dim));
      }
    });
}

TEST_CASE("a mesh over a part of the world leaves the others out", "[mesh][device_mesh]") {
  on_ranks(5, [](Rank& rank) {
    const DeviceMesh mesh = init_device_mesh(rank.world(), {2, 2}, {"replicate", "shard"}, {.ranks = {4, 3, 1, 0}});
    rank.check_equal(mesh.is_member(), rank.index() != 2, "membership");
    rank.check_equal(mesh.ranks(), std::vector<int>{4, 3, 1, 0}, "ranks");
    if (rank.index() == 2) {
      rank.check_throws<StateError>([&] { mesh.get_coordinate(); },
                                    {"DeviceMesh(cpu, replicate=2, shard=2)", "4, 3, 1, 0", "is_member()"}, "place");
      rank.check_throws<StateError>([&] { mesh.get_group("shard"); }, {"is_member()"}, "group");
      rank.check_throws<StateError>([&] { mesh.get_local_rank(1); }, {"is_member()"}, "local rank");
      return;
    }
    const at::Tensor sum = torch::tensor({int64_t{rank.index()}});
    mesh.get_group("shard")->start_all_reduce(sum, ReduceOp::kSum, "ranks")->wait();
    rank.check_equal(sum.item<int64_t>(), rank.index() >= 3 ? 7 : 1, "sum of the row");
  });
}

TEST_CASE("a sub-mesh shares the groups of its mesh and makes none", "[mesh][device_mesh]") {
  for (int rank = 0; rank < 8; ++rank) {
    const auto world = SplitLog::world(rank, 8);
    const DeviceMesh mesh = three_dims(world);
    const size_t splits_before = world->splits().size();
    const DeviceMesh data = mesh.submesh({"replicate", "shard"});
    CHECK(data.to_string() == "DeviceMesh(cpu, replicate=2, shard=2)");
    const int first = rank / 4 * 4;
    CHECK(data.ranks() == std::vector<int>{first, first + 1, first + 2, first + 3});
    CHECK(data.get_coordinate() == Coordinates{rank / 2 % 2, rank % 2});
    CHECK(data.get_group("shard") == mesh.get_group("shard"));
    CHECK(data["replicate"].get_group() == mesh.get_group("replicate"));
    CHECK(mesh["pp"].ranks() == std::vector<int>{rank % 4, rank % 4 + 4});
    CHECK(world->splits().size() == splits_before);
  }
}

TEST_CASE("a sub-mesh has its dimensions in the order asked for", "[mesh][device_mesh]") {
  const DeviceMesh turned = three_dims(SplitLog::world(6, 8)).submesh({"shard", "pp"});
  CHECK(turned.dim_names() == Names{"shard", "pp"});
  CHECK(turned.get_coordinate() == Coordinates{0, 1});
  CHECK(turned.ranks() == std::vector<int>{2, 6, 3, 7});
}

TEST_CASE("a rank outside of the mesh has sub-meshes that it is not a member of", "[mesh][device_mesh]") {
  const DeviceMesh mesh =
      init_device_mesh(SplitLog::world(4, 5), {2, 2}, {"replicate", "shard"}, {.ranks = {0, 1, 2, 3}});
  CHECK_FALSE(mesh["shard"].is_member());
  CHECK(mesh["shard"].shape() == std::vector<int64_t>{2});
}

TEST_CASE("wrong dimensions and names are refused, naming the known ones", "[mesh][device_mesh]") {
  const DeviceMesh mesh = init_device_mesh(SplitLog::world(0, 4), {2, 2}, {"replicate", "shard"});
  CHECK_THAT(error_of<UsageError>([&] { mesh.dim("tp"); }),
             Contains("DeviceMesh(cpu, replicate=2, shard=2)") && Contains("(replicate, shard)") &&
                 Contains("got \"tp\""));
  CHECK_THAT(error_of<UsageError>([&] { mesh["tp"]; }), Contains("got \"tp\""));
  CHECK_THAT(error_of<UsageError>([&] { mesh.get_group("tp"); }), Contains("got \"tp\""));
  CHECK_THAT(error_of<UsageError>([&] { mesh.submesh({"shard", "shard"}); }), Contains("\"shard\" twice"));
  CHECK_THAT(error_of<UsageError>([&] { mesh.submesh({}); }), Contains("at least one") && Contains("got none"));
  CHECK_THAT(error_of<UsageError>([&] { mesh.size(2); }), Contains("[0, 2)") && Contains("got 2"));
  CHECK_THAT(error_of<UsageError>([&] { mesh.get_group(-1); }), Contains("got -1"));
  CHECK_THAT(error_of<UsageError>([] { init_device_mesh(SplitLog::world(0, 2), {2}).dim("shard"); }),
             Contains("it has none"));
  CHECK_THAT(error_of<UsageError>([] { DeviceMesh().size(); }),
             Contains("undefined") && Contains("init_device_mesh"));
}

TEST_CASE("flattening the whole world reuses it", "[mesh][device_mesh]") {
  const auto world = SplitLog::world(3, 4);
  const DeviceMesh mesh = init_device_mesh(world, {2, 2}, {"replicate", "shard"});
  const size_t splits_before = world->splits().size();
  const DeviceMesh flat = mesh.flatten("dp");
  CHECK(flat.to_string() == "DeviceMesh(cpu, dp=4)");
  CHECK(flat.get_group() == world);
  CHECK(flat.get_coordinate() == Coordinates{3});
  CHECK(world->splits().size() == splits_before);
  CHECK(mesh["shard"].flatten("dp").get_group() == mesh.get_group("shard"));
  CHECK(mesh["shard"].flatten("dp").dim_names() == Names{"dp"});
}

TEST_CASE("flattening a sub-mesh makes the groups of all its siblings, on every rank", "[mesh][device_mesh]") {
  for (int rank = 0; rank < 9; ++rank) {
    const auto world = SplitLog::world(rank, 9);
    const DeviceMesh mesh = init_device_mesh(world, {2, 2, 2}, {"pp", "replicate", "shard"},
                                             {.ranks = {0, 1, 2, 3, 4, 5, 6, 7}});
    const size_t splits_before = world->splits().size();
    const DeviceMesh flat = mesh.submesh({"replicate", "shard"}).flatten("dp");
    const SplitLog::Log made(world->splits().begin() + splits_before, world->splits().end());
    CHECK(made == SplitLog::Log{"world: dp[0,1,2,3]", "world: dp[4,5,6,7]"});
    CHECK(flat.is_member() == (rank < 8));
    if (rank < 8) CHECK(flat.get_local_rank() == rank % 4);
  }
}

TEST_CASE("a flattened mesh communicates among all its ranks", "[mesh][device_mesh]") {
  on_ranks(8, [](Rank& rank) {
    const DeviceMesh flat = three_dims(rank.world()).submesh({"pp", "shard"}).flatten("all");
    const at::Tensor sum = torch::tensor({int64_t{rank.index()}});
    flat.get_group()->start_all_reduce(sum, ReduceOp::kSum, "ranks")->wait();
    // replicate = 0: ranks 0, 1, 4, 5; replicate = 1: ranks 2, 3, 6, 7.
    rank.check_equal(sum.item<int64_t>(), rank.index() / 2 % 2 == 0 ? 10 : 18, "sum of the ranks");
  });
}

TEST_CASE("a mesh from groups cannot be flattened, nor any mesh without a name", "[mesh][device_mesh]") {
  const DeviceMesh mesh = init_device_mesh(SplitLog::world(0, 4), {2, 2}, {"replicate", "shard"});
  const DeviceMesh from_groups = DeviceMesh::from_group({mesh.get_group("shard"), mesh.get_group("replicate")});
  CHECK_THAT(error_of<UsageError>([&] { from_groups.flatten("dp"); }),
             Contains("made from groups") && Contains("init_device_mesh"));
  CHECK_THAT(error_of<UsageError>([&] { mesh.flatten(""); }), Contains("needs a name"));
}

TEST_CASE("meshes are equal if ranks, shape, names and device type are", "[mesh][device_mesh]") {
  const auto world = SplitLog::world(0, 4);
  const DeviceMesh mesh = init_device_mesh(world, {2, 2}, {"a", "b"});
  CHECK(mesh == init_device_mesh(world, {2, 2}, {"a", "b"}));
  CHECK_FALSE(mesh == init_device_mesh(world, {2, 2}, {"a", "c"}));
  CHECK_FALSE(mesh == init_device_mesh(world, {4, 1}, {"a", "b"}));
  CHECK_FALSE(mesh == init_device_mesh(world, {2, 2}, {"a", "b"}, {.ranks = {0, 2, 1, 3}}));
  CHECK_FALSE(mesh == DeviceMesh());
  CHECK(DeviceMesh() == DeviceMesh());
}

TEST_CASE("making a mesh, its sub-meshes and flattening it run no collective", "[mesh][device_mesh]") {
  on_ranks(8, [](Rank& rank) {
    const DeviceMesh mesh = three_dims(rank.world());
    mesh.submesh({"replicate", "shard"}).flatten("dp");
    mesh["shard"].flatten("rows");
    DeviceMesh::from_group({mesh.get_group("shard"), mesh.get_group("replicate")});
    rank.check_equal(rank.calls(), Names{}, "calls");
  });
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
TEST_CASE("the names of 0.1 do what those that replaced them do", "[mesh][device_mesh]") {
  const DeviceMesh mesh = init_device_mesh(SplitLog::world(1, 4), {2, 2}, {"replicate", "shard"});
  CHECK(mesh.coordinates() == mesh.get_coordinate());
  CHECK(mesh.local_rank(1) == mesh.get_local_rank("shard"));
  CHECK(mesh.group("shard") == mesh.get_group(1));
  CHECK(mesh_from_groups({mesh.group(1)}) == DeviceMesh::from_group({mesh.get_group("shard")}));
}
#pragma GCC diagnostic pop

}  // namespace fsdp::test
