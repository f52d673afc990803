#include <catch2/catch.hpp>

#include "support/models.hpp"

// The engine on every kind of mesh.

namespace fsdp::test {
namespace {

MakeWorkload chain(int64_t width = 6) {
  return [width] { return chain_workload(3, width); };
}

TEST_CASE("one dimension of 1 to 8 ranks, with dims smaller than the world", "[runtime][meshes]") {
  for (int world_size : {1, 2, 3, 4, 5, 8}) trains_like_plain(chain(5), {.world_size = world_size});
}

TEST_CASE("HSDP of 2 x 2, 2 x 3, 4 x 1 and 1 x 4", "[runtime][meshes]") {
  trains_like_plain(chain(), {.world_size = 4, .replicas = 2});
  trains_like_plain(chain(), {.world_size = 6, .replicas = 2});
  trains_like_plain(chain(), {.world_size = 4, .replicas = 4});
  trains_like_plain(chain(), {.world_size = 4, .replicas = 1});
}

TEST_CASE("HSDP reduces within the shard group, then across replicas", "[runtime][meshes]") {
  on_ranks(4, [](Rank& rank) {
    auto mesh = rank.hybrid(2, 2);
    ShardedChain chain(mesh, 2);
    rank.check(chain.root[0].placements() == std::vector<Placement>{Replicate{}, Shard{0}}, "placements");
    for (int step = 0; step < 2; ++step) {
      rank.log().clear();
      chain.step(rank.index(), step);
      rank.check_equal(rank.subjects_of("reduce_scatter").size(), size_t{3}, "one reduce-scatter a group");
      rank.check_equal(rank.subjects_of("all_reduce"), rank.subjects_of("reduce_scatter"), "then one all-reduce, in order");
      for (auto& call : rank.log().calls)
        rank.check_equal(call.group, call.operation == "all_reduce" ? mesh.get_group(0)->name() : mesh.get_group(1)->name(),
                         call.operation);
    }
  });
}

TEST_CASE("replicate-only keeps whole parameters on every rank and averages gradients", "[runtime][meshes]") {
  for (int world_size : {1, 2, 3}) trains_like_plain(chain(), {.world_size = world_size, .replicate_only = true});
  trains_like_plain(chain(), {.micro_batches = 2, .accumulation = Accumulation::kSyncAtLast, .max_norm = 0.1});
  on_ranks(2, [](Rank& rank) {
    auto model = plain_chain(1);
    auto root = fully_shard(model, {.mesh = rank.mesh(), .replicate_only = true});
    rank.check(root.placements() == std::vector<Placement>{Replicate{}}, "placements");
    for (int step = 0; step < 2; ++step) {
      rank.log().clear();
      Inputs inputs(rank.index(), step);
      model->forward(inputs.normal({2, 6})).sum().backward();
      rank.check_equal(rank.calls().size(), size_t{1}, fmt::format("one all-reduce: {}", rank.calls()));
      rank.check_equal(rank.subjects_of("all_reduce").size(), size_t{1}, "an all-reduce");
    }
  });
}

TEST_CASE("reshard_after_forward by bool and by integer trains like plain", "[runtime][meshes]") {
  for (ReshardAfterForward reshard : {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(1),
                                      ReshardAfterForward(2), ReshardAfterForward(4)}) {
    trains_like_plain(chain(5), {.world_size = 4, .reshard_after_forward = reshard});
    trains_like_plain(chain(5), {.world_size = 4, .micro_batches = 2, .accumulation = Accumulation::kSyncAtLast,
                                 .reshard_after_forward = reshard});
  }
  for (int ranks : {1, 2, 3, 6}) trains_like_plain(chain(5), {.world_size = 6, .reshard_after_forward = ranks});
  trains_like_plain(chain(5), {.world_size = 8, .replicas = 2, .reshard_after_forward = 2});
}

TEST_CASE("an integer reshard gathers over that many contiguous ranks in backward", "[runtime][meshes]") {
  on_ranks(4, [](Rank& rank) {
    auto model = plain_chain(2, 8);
    // not the first layer, whose backward reads no weight
    auto layer = fully_shard(model->layers[1], {.mesh = rank.mesh(), .reshard_after_forward = 2});
    fully_shard(model, {.mesh = rank.mesh()});
    for (int step = 0; step < 3; ++step) {
      rank.log().clear();
      Inputs inputs(rank.index(), step);
      auto loss = model->forward(inputs.normal({2, 8})).square().mean();
      loss.backward();
      std::vector<RecordedCall> gathers;
      for (auto& call : rank.log().calls)
        if (call.operation == "all_gather" && call.subject == "layer1") gathers.push_back(call);
      rank.check_equal(gathers.size(), size_t{2}, "once in forward, once in backward");
      if (gathers.size() != 2) return;
      rank.check(gathers[0].group == rank.mesh().get_group()->name(), "forward gathers over all ranks");
      rank.check(gathers[1].group != gathers[0].group, "backward over another group");
      rank.check(gathers[1].bytes <= gathers[0].bytes + 64 && gathers[1].bytes >= 72 * 4, "of the whole parameter");
      model->zero_grad();
    }
    rank.check(!layer.is_unsharded(), "released");
  });
}

TEST_CASE("an integer reshard follows the optimizer's writes", "[runtime][meshes]") {
  trains_like_plain(chain(7), {.world_size = 4, .steps = 5, .reshard_after_forward = 2, .max_norm = 0.05});
}

TEST_CASE("modules of one tree may use meshes of their own", "[runtime][meshes]") {
  on_ranks(4, [](Rank& rank) {
    auto plain = plain_chain();
    auto model = plain_chain();
    auto hybrid = rank.hybrid(2, 2);
    fully_shard(model->layers[0], {.mesh = rank.mesh()});
    fully_shard(model->layers[1], {.mesh = hybrid});
    fully_shard(model->layers[2], {.mesh = rank.mesh(), .replicate_only = true});
    fully_shard(model, {.mesh = hybrid});
    for (int step = 0; step < 3; ++step) {
      auto expected = averaged_gradients(plain, 4, step);
      model->zero_grad();
      Inputs inputs(rank.index(), step);
      model->forward(inputs.normal({4, 6})).square().mean().backward();
      auto parameters = unique_parameters(*model);
      for (size_t i = 0; i < parameters.size(); ++i)
        rank.check_close(grad_dtensor_of(parameters[i].second).full_tensor(), expected[i].second, parameters[i].first);
    }
  });
}

TEST_CASE("double precision trains to double precision", "[runtime][meshes]") {
  trains_like_plain(chain(), {.world_size = 3, .steps = 4, .dtype = at::kDouble});
}

TEST_CASE("clipping in every kind of mesh", "[runtime][meshes]") {
  trains_like_plain(chain(5), {.world_size = 3, .max_norm = 0.05});
  trains_like_plain(chain(5), {.world_size = 4, .replicas = 2, .max_norm = 0.05});
  trains_like_plain(chain(5), {.world_size = 2, .replicate_only = true, .max_norm = 0.05});
}

}  // namespace
}  // namespace fsdp::test
