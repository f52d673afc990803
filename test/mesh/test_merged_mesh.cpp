#include <catch2/catch.hpp>

#include "fsdp/error.hpp"
#include "mesh/merged_mesh.hpp"
#include "mesh/mesh_info.hpp"
#include "support/printed.hpp"
#include "support/split_log.hpp"
#include "support/error_of.hpp"
#include "support/ranks.hpp"

namespace fsdp::test {
namespace {

using Catch::Contains;

DeviceMesh three(const std::shared_ptr<Communicator>& world) {
  return init_device_mesh(world, {2, 2, 2}, {"dp", "cp", "tp"});
}

}  // namespace

TEST_CASE("several dimensions become one, in the order given, on every rank alike", "[mesh][merged_mesh]") {
  for (int rank = 0; rank < 8; ++rank) {
    const auto world = SplitLog::world(rank, 8);
    const DeviceMesh mesh = three(world);
    const DeviceMesh merged = merged_mesh(mesh, {{1, 0}, {2}});
    CHECK(merged.to_string() == "DeviceMesh(cpu, cp_dp=4, tp=2)");
    CHECK(merged.get_coordinate() == std::vector<int64_t>{mesh.get_local_rank(1) * 2 + mesh.get_local_rank(0), mesh.get_local_rank(2)});
    CHECK(merged.ranks() == std::vector<int>{0, 1, 4, 5, 2, 3, 6, 7});
    CHECK(merged.get_group("cp_dp")->ranks() == (rank % 2 == 0 ? std::vector<int>{0, 4, 2, 6} : std::vector<int>{1, 5, 3, 7}));
    CHECK(merged.get_group("tp") == mesh.get_group("tp"));
  }
}

TEST_CASE("groups of merged dimensions are made once, for meshes cut from one", "[mesh][merged_mesh]") {
  const auto world = SplitLog::world(0, 8);
  const DeviceMesh mesh = three(world);
  const DeviceMesh merged = merged_mesh(mesh, {{0, 1}});
  const size_t splits = world->splits().size();
  CHECK(merged_mesh(mesh, {{0, 1}}).get_group(0) == merged.get_group(0));
  CHECK(merged_mesh(mesh.submesh({"dp", "cp"}), {{0, 1}}).get_group(0) == merged.get_group(0));
  CHECK(merged_mesh(mesh, {{2}, {0}}) == mesh.submesh({"tp", "dp"}));
  CHECK(world->splits().size() == splits);
}

TEST_CASE("parts of one mesh join", "[mesh][merged_mesh]") {
  for (int rank = 0; rank < 8; ++rank) {
    const DeviceMesh mesh = three(SplitLog::world(rank, 8));
    CHECK(joined_mesh(mesh.submesh({"dp", "cp"}), mesh["tp"]) == mesh);
    const DeviceMesh turned = joined_mesh(mesh["tp"], mesh["dp"]);
    CHECK(turned == mesh.submesh({"tp", "dp"}));
    CHECK(turned.get_coordinate() == std::vector<int64_t>{mesh.get_local_rank(2), mesh.get_local_rank(0)});
  }
  const auto world = SplitLog::world(0, 8);
  const DeviceMesh mesh = three(world);
  CHECK_THAT(error_of<UsageError>([&] { joined_mesh(mesh["dp"], three(world)["tp"]); }), Contains("not cut from one mesh"));
  CHECK_THAT(error_of<UsageError>([&] { joined_mesh(mesh["dp"], mesh.submesh({"tp", "dp"})); }), Contains("in common"));
}

TEST_CASE("names give dimensions their parts", "[mesh][merged_mesh]") {
  const auto world = SplitLog::world(5, 8);  // at (1, 0, 1)
  const DeviceMesh mesh = three(world);
  const MeshInfo hybrid = make_mesh_info(mesh, DataParallelMeshDims{.shard = "cp", .replicate = "dp"});
  CHECK(hybrid.mesh.to_string() == "DeviceMesh(cpu, dp=2, cp=2)");
  CHECK(hybrid.shard_group == mesh.get_group("cp"));
  CHECK(hybrid.replicate_group == mesh.get_group("dp"));
  CHECK(hybrid.others == mesh["tp"]);
  CHECK(hybrid.whole == mesh);
  const MeshInfo flat = make_mesh_info(mesh, DataParallelMeshDims{.shard = {"dp", "cp"}});
  CHECK(flat.shard_size() == 4);
  CHECK(flat.shard_rank() == 2);
  CHECK(flat.placements() == std::vector<Placement>{Shard{0}});
  const MeshInfo copies = make_mesh_info(mesh, DataParallelMeshDims{.replicate = {"dp", "cp", "tp"}});
  CHECK(copies.placements() == std::vector<Placement>{Replicate{}});
  CHECK(copies.data_parallel_size() == 8);
  CHECK_FALSE(copies.whole.defined());
}

TEST_CASE("replicas beside shards span both dimensions", "[mesh][merged_mesh]") {
  const auto world = SplitLog::world(5, 8);
  const DeviceMesh mesh = init_device_mesh(world, {2, 4}, {"replicate", "shard"});
  const MeshInfo info = make_mesh_info(mesh, MeshUse::kShard);
  const MeshInfo beside = replicate_beside(info);
  CHECK(beside.shard_size() == 1);
  CHECK(beside.replicate_size() == 8);
  CHECK(beside.replicate_rank() == 5);
  CHECK(beside.mesh == mesh);
  CHECK(beside.placements() == std::vector<Placement>{Replicate{}, Replicate{}});
  CHECK(replicate_beside(info).replicate_group == beside.replicate_group);

  const MeshInfo one = make_mesh_info(mesh["shard"], MeshUse::kShard);
  CHECK(replicate_beside(one).replicate_group == one.shard_group);
  const MeshInfo merged = make_mesh_info(three(world), DataParallelMeshDims{.shard = "cp", .replicate = "dp"});
  CHECK(replicate_beside(merged).replicate_size() == 4);
}

}  // namespace fsdp::test
