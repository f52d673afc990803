#include <catch2/catch.hpp>

#include "support/models.hpp"

// A full mesh of any number of dimensions, of which names say what shards and what replicates.

namespace fsdp::test {
namespace {

/// Trains a chain over the dimensions named, of a mesh of this shape, and compares with the plain model that
/// sees the batch of each data-parallel rank once.
void check_training(Rank& rank, const std::vector<int64_t>& shape, const std::vector<std::string>& names,
                    const DataParallelMeshDims& dims, bool replicates_some = false) {
  const auto mesh = init_device_mesh(rank.world(), shape, names);
  auto plain = plain_chain(2, 5), model = plain_chain(2, 5);
  FullyShardOptions options{.mesh = mesh, .dp_mesh_dims = dims};
  if (replicates_some) options.replicated_params = {model->layers[0]->weight, model->head->bias};
  for (auto& layer : model->layers) fully_shard(layer, options);
  auto root = fully_shard(model, options);

  int64_t ranks = 1, place = 0;  // data-parallel ones, in the order of the names: replicas outside
  auto order = dims.replicate.names;
  order.insert(order.end(), dims.shard.names.begin(), dims.shard.names.end());
  for (const auto& name : order) {
    ranks *= mesh.size(mesh.dim(name));
    place = place * mesh.size(mesh.dim(name)) + mesh.get_local_rank(mesh.dim(name));
  }
  torch::optim::SGD optimizer(model->parameters(), 0.1), expected(plain->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    const auto gradients = averaged_gradients(plain, static_cast<int>(ranks), step);
    optimizer.zero_grad();
    Inputs inputs(static_cast<int>(place), step);
    model->forward(inputs.normal({4, 5})).square().mean().backward();
    const auto parameters = unique_parameters(*model);
    for (size_t i = 0; i < parameters.size(); ++i) {
      rank.check_close(full_grad(parameters[i].second), gradients[i].second, "gradient of " + parameters[i].first);
      plain->parameters()[i].mutable_grad() = gradients[i].second;
    }
    optimizer.step();
    expected.step();
    for (size_t i = 0; i < parameters.size(); ++i) {
      rank.check_close(full_tensor(parameters[i].second), plain->parameters()[i].detach(), "weight " + parameters[i].first);
      const auto whole = dtensor_of(parameters[i].second);
      rank.check_close(whole.full_tensor(), plain->parameters()[i].detach(), "DTensor of " + parameters[i].first);
      rank.check_equal(whole.mesh().size(), mesh.size(), "it is over the full mesh");
    }
  }
  rank.check_equal(root.mesh().size(), ranks, "the data-parallel mesh");
}

TEST_CASE("names say which dimensions of a mesh shard and which replicate", "[runtime][dp_mesh_dims]") {
  const std::vector<std::string> three{"pp", "dp", "cp"};
  struct Case {
    std::vector<int64_t> shape;
    DataParallelMeshDims dims;
  };
  for (const auto& [shape, dims] : std::vector<Case>{
           {{2, 2, 2}, {.shard = "dp"}},
           {{2, 2, 2}, {.shard = "cp", .replicate = "dp"}},
           {{2, 2, 2}, {.shard = "dp", .replicate = "cp"}},
           {{2, 2, 2}, {.shard = {"dp", "cp"}}},
           {{2, 2, 2}, {.shard = {"cp", "dp"}, .replicate = "pp"}},
           {{2, 2, 2}, {.shard = "pp", .replicate = {"dp", "cp"}}},
           {{2, 2, 2}, {.shard = {"pp", "dp", "cp"}}},
           {{1, 3, 2}, {.shard = {"dp", "cp"}}},
           {{2, 1, 3}, {.shard = "cp", .replicate = {"pp", "dp"}}},
           {{1, 2, 1}, {.shard = {"pp", "dp"}}},
           {{2, 2, 1}, {.replicate = {"pp", "dp"}}}}) {
    for (const bool replicates_some : {false, true})
      CHECK(on_ranks(static_cast<int>(shape[0] * shape[1] * shape[2]),
                     [&, &shape = shape, &dims = dims](Rank& rank) { check_training(rank, shape, three, dims, replicates_some); }));
  }
}

TEST_CASE("placements and mesh are those of the data-parallel dimensions, names joined", "[runtime][dp_mesh_dims]") {
  on_ranks(8, [](Rank& rank) {
    const auto mesh = init_device_mesh(rank.world(), {2, 2, 2}, {"dp", "cp", "tp"});
    auto model = plain_chain(2);
    FullyShardOptions options{.mesh = mesh, .dp_mesh_dims = DataParallelMeshDims{.shard = {"dp", "cp"}}};
    auto layer = fully_shard(model->layers[0], options);
    rank.check_equal(layer.mesh().to_string(), "DeviceMesh(cpu, dp_cp=4)", "mesh");
    rank.check(layer.placements() == std::vector<Placement>{Shard{0}}, "placements");
    auto root = fully_shard(model, options);
    rank.check(root.mesh().get_group(0) == layer.mesh().get_group(0), "groups are made once");
    const auto whole = dtensor_of(model->head->weight);
    rank.check_equal(whole.mesh().to_string(), "DeviceMesh(cpu, dp_cp=4, tp=2)", "with the others");
    rank.check(whole.placements() == std::vector<Placement>{Shard{0}, Replicate{}}, "the same on tensor-parallel ranks");

    // An integer reshard on merged dimensions.
    root.set_reshard_after_forward(2);
    Inputs inputs(0, 0);
    model->forward(inputs.normal({4, 6})).square().mean().backward();
    rank.check(model->head->bias.defined(), "a step");
  });
  on_ranks(4, [](Rank& rank) {
    const auto mesh = init_device_mesh(rank.world(), {2, 2}, {"dp", "tp"});
    auto model = plain_chain(1);
    fully_shard(model, {.mesh = mesh, .dp_mesh_dims = DataParallelMeshDims{.shard = "dp"}});
    rank.check(dtensor_of(model->head->weight).mesh() == mesh, "the mesh given, where nothing is merged");
  });
}

TEST_CASE("names that are unknown, repeated, overlapping or none are refused", "[runtime][dp_mesh_dims]") {
  on_ranks(4, [](Rank& rank) {
    const auto mesh = init_device_mesh(rank.world(), {2, 2, 1}, {"dp", "cp", "tp"});
    auto model = plain_chain(1);
    const auto refused = [&](const DataParallelMeshDims& dims, const std::vector<std::string>& parts, const std::string& what) {
      rank.check_throws<UsageError>([&] { fully_shard(model, {.mesh = mesh, .dp_mesh_dims = dims}); }, parts, what);
    };
    refused({.shard = "ddp"}, {"ddp", "dp, cp, tp"}, "unknown");
    refused({.shard = {"dp", "dp"}}, {"dp", "2 times", "dp=2, cp=2, tp=1"}, "repeated");
    refused({.shard = {"dp", "cp"}, .replicate = "cp"}, {"cp", "2 times", "dp=2, cp=2, tp=1"}, "overlapping");
    refused({}, {"no dimension", "dp=2, cp=2, tp=1"}, "none");
    rank.check_throws<UsageError>([&] { fully_shard(model, {.mesh = mesh}); }, {"dp_mesh_dims", "dp=2, cp=2, tp=1"}, "no names for three");
    rank.check_throws<UsageError>(
        [&] { fully_shard(model, {.mesh = mesh, .dp_mesh_dims = DataParallelMeshDims{.shard = "dp"}, .replicate_only = true}); },
        {"replicate_only"}, "shards and replicates only");
    rank.check_throws<UsageError>([&] { fully_shard(model, {.mesh = rank.mesh()[ "shard"], .dp_mesh_dims = DataParallelMeshDims{.shard = "dp"}}); },
                                  {"dp", "shard"}, "of another mesh");
    rank.check(model->parameters()[0].is_same(model->layers[0]->weight), "nothing has changed");
  });
}

}  // namespace
}  // namespace fsdp::test
