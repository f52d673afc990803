#include <catch2/catch.hpp>

#include "support/sample.hpp"
#include "support/tensor_parallel_model.hpp"
#include "support/draw.hpp"

// Modules that hold their tensor-parallel rank's part of a tensor, sharded further by data parallelism.

namespace fsdp::test {
namespace {

namespace nn = torch::nn;
using at::Tensor;

void trains_like_plain(Rank& rank, const TpCase& c) {
  TpModel tp(rank, c);
  tp.shard(c);
  const bool is_flat = c.layout == ParamLayout::kFlat;
  const auto options = torch::optim::AdamWOptions(2e-2).eps(1e-2).weight_decay(0.1);
  torch::optim::AdamW optimizer(tp.model->parameters(), options), expected_optimizer(tp.plain->parameters(), options);
  const auto expected = tp.plain->named_parameters();
  for (int step = 0; step < 3; ++step) {
    const auto what = fmt::format("{}: step {}: ", c.text(), step);
    optimizer.zero_grad();
    const auto losses = plain_backward(tp.plain, c.data_parallel(), step);
    const auto loss = tp.model->loss(tp.batch, step);
    loss.backward();
    rank.check_close(loss.detach(), losses[static_cast<size_t>(tp.batch)].detach(), what + "loss");
    for (const auto& param : tp.model->named_parameters()) {
      rank.check_close(full_grad(param.value()), expected[param.key()].grad(), what + "gradient of " + param.key());
      if (!is_flat)
        rank.check_close(grad_dtensor_of(param.value()).full_tensor(), expected[param.key()].grad(),
                         what + "gradient's DTensor of " + param.key());
    }
    if (c.max_norm) {
      for (const double p : {1.0, std::numeric_limits<double>::infinity()}) {
        double norm = 0;
        for (const auto& param : tp.plain->parameters()) {
          const double one = at::linalg_vector_norm(param.grad().to(at::kDouble), p).item<double>();
          norm = std::isinf(p) ? std::max(norm, one) : norm + one;
        }
        const double found = get_total_norm(tp.model->parameters(), p);
        rank.check(std::abs(norm - found) <= 1e-5 * norm, fmt::format("{}norm {}: expected {}, found {}", what, p, norm, found));
      }
      const double norm = torch::nn::utils::clip_grad_norm_(tp.plain->parameters(), *c.max_norm);
      const double found = clip_grad_norm_(tp.model->parameters(), *c.max_norm);
      rank.check(std::abs(norm - found) <= 1e-5 * norm, fmt::format("{}norm: expected {}, found {}", what, norm, found));
    }
    optimizer.step();
    expected_optimizer.step();
    check_weights(rank, tp.model, tp.plain, what + "weight ", is_flat);
  }
}

TEST_CASE("a tensor-parallel MLP under FSDP trains like the plain one", "[runtime][tensor_parallel]") {
  Sample sample(2);
  for (const auto& shape : std::vector<std::vector<int64_t>>{{2, 2}, {4, 2}, {3, 2}, {2, 1}, {1, 2}, {2, 3}, {2, 2, 2}})
    for (const Says says : {Says::kDims, Says::kMesh}) {
      if (!sample.takes_next()) continue;
      const TpCase c{.shape = shape, .says = says, .max_norm = 0.05};
      CHECK(on_ranks(c.ranks(), [&](Rank& rank) { trains_like_plain(rank, c); }));
    }
}

TEST_CASE("so it does for any sizes, cuts and layouts", "[runtime][tensor_parallel]") {
  const uint64_t seed = draw_seed();
  INFO("FSDP_TEST_SEED=" << seed);
  Draw draw(seed);
  const std::vector<std::vector<int64_t>> shapes{{2, 2}, {4, 2}, {3, 2}, {2, 1}, {2, 3}, {1, 3}, {2, 4}, {2, 2, 2}, {1, 2, 2}, {2, 1, 2}};
  for (int i = 0; i < Sample::draws(30); ++i) {
    TpCase c{.shape = draw.one_of(shapes), .width = draw.between(3, 9), .hidden = draw.between(1, 13)};
    c.says = draw.one_of<Says>({Says::kDims, Says::kMesh});
    if (draw.between(0, 1) == 0) c.max_norm = 0.05;
    if (draw.between(0, 1) == 0) c.dim = draw.between(0, 1);
    if (!c.dim && draw.between(0, 2) == 0) c.layout = ParamLayout::kFlat;
    c.is_merged = c.shape.size() == 3 && c.says == Says::kDims && draw.between(0, 1) == 0;
    c.reshard = draw.one_of<ReshardAfterForward>({{}, true, false, 1});
    c.replicates_some = draw.between(0, 2) == 0;
    INFO(c.text());
    CHECK(on_ranks(c.ranks(), [&](Rank& rank) { trains_like_plain(rank, c); }));
  }
}

TEST_CASE("what is thawed by parameters() behind a recorded evaluation trains, where this rank's rows are registered",
          "[runtime][tensor_parallel]") {
  on_ranks(4, [](Rank& rank) {
    const TpCase c{.shape = {2, 2}, .layout = ParamLayout::kFlat};
    TpModel tp(rank, c);
    tp.shard(c);
    const auto expected = tp.plain->named_parameters();
    for (int step = 0; step < 3; ++step) {
      tp.model->zero_grad();
      tp.plain->zero_grad();
      tp.model->loss(tp.batch, step);
      const bool is_frozen = step == 1;
      for (auto& param : tp.model->named_parameters())
        if (cut_dim(param.key())) param.value().set_requires_grad(!is_frozen);
      plain_backward(tp.plain, 2, step);
      tp.model->loss(tp.batch, step).backward();
      for (const auto& param : tp.model->named_parameters()) {
        const auto what = fmt::format("step {}: gradient of {}", step, param.key());
        rank.check_equal(param.value().grad().defined(), !is_frozen || !cut_dim(param.key()), what);
        if (param.value().grad().defined()) rank.check_close(full_grad(param.value()), expected[param.key()].grad(), what);
      }
    }
  });
}

TEST_CASE("placements join both: strided where both cut one dimension", "[runtime][tensor_parallel]") {
  on_ranks(8, [](Rank& rank) {
    const TpCase c{.shape = {2, 2, 2}};
    TpModel tp(rank, c);
    auto root = tp.shard(c);
    auto* layer = tp.model->layers[0]->as<TpMlpImpl>();
    using Placements = std::vector<Placement>;
    const auto whole = dtensor_of(layer->up->weight);
    rank.check(whole.mesh() == tp.mesh, "the full mesh");
    rank.check_equal(to_string(whole.placements()), to_string(Placements{Replicate{}, StridedShard{0, 2}, Shard{0}}), "by columns");
    rank.check_equal(to_string(dtensor_of(layer->down->weight).placements()), to_string(Placements{Replicate{}, Shard{0}, Shard{1}}), "by rows");
    rank.check_equal(to_string(dtensor_of(layer->bias).placements()), to_string(Placements{Replicate{}, Shard{0}, Replicate{}}), "whole");
    rank.check_equal(layer->up->weight.sizes().vec(), std::vector<int64_t>{4, 6}, "the unsharded parameter is local");
    rank.check(root.mesh() == tp.mesh.submesh({"replicate", "shard"}), "the unsharded parameter's mesh is the data-parallel one");
    rank.check(report(root).to_string().find("StridedShard(dim=0, split_factor=2)") != std::string::npos, "report");
  });
}

TEST_CASE("wrong parts are refused by name, with nothing changed", "[runtime][tensor_parallel]") {
  on_ranks(4, [](Rank& rank) {
    const TpCase c{.shape = {2, 2}};
    TpModel tp(rank, c);
    auto* layer = tp.model->layers[0]->as<TpMlpImpl>();
    const auto weight = layer->up->weight;
    const auto refused = [&](TensorParallel part, const std::vector<std::string>& parts, const std::string& what) {
      auto options = tp.options(c);
      options.tensor_parallel_fn = [part](const std::string& name, const Tensor&) {
        return name == "up.weight" ? std::optional(part) : std::nullopt;
      };
      rank.check_throws<UsageError>([&] { fully_shard(*layer, options); }, parts, what);
    };
    refused({.placements = {Shard{0}}, .sizes = {11, 6}}, {"up.weight", "(11, 6)", "(4, 6)"}, "other sizes");
    refused({.placements = {Shard{0}}, .sizes = {8}}, {"up.weight", "as many dimensions"}, "other dimensions");
    refused({.placements = {Shard{2}}}, {"up.weight", "[-2, 2)"}, "no such dimension");
    refused({.placements = {Shard{0}, Replicate{}}}, {"up.weight", "one placement for each"}, "too many placements");
    refused({.placements = {Partial{}}}, {"up.weight", "Partial"}, "a summand");
    refused({.placements = {Shard{0}}, .mesh = rank.mesh()}, {"not cut from one mesh"}, "a mesh of another root");
    refused({.placements = {Shard{0}}, .mesh = tp.mesh["dp"]}, {"in common"}, "the data-parallel mesh");
    auto options = tp.options(c);
    options.dp_mesh_dims.reset();
    options.mesh = tp.mesh["dp"];
    rank.check_throws<UsageError>([&] { fully_shard(*layer, options); }, {"names no mesh"}, "no mesh at all");
    rank.check(layer->up->parameters()[0].is_same(weight), "nothing has changed");
    auto inferred = tp.options(c);
    inferred.tensor_parallel_fn = [](const std::string& name, const Tensor&) -> std::optional<TensorParallel> {
      if (const auto dim = cut_dim(name)) return TensorParallel{.placements = {Shard{*dim}}};
      return std::nullopt;
    };
    fully_shard(*layer, inferred);
    rank.check_equal(dtensor_of(weight).sizes().vec(), std::vector<int64_t>{8, 6}, "sizes without being told");
  });
}

TEST_CASE("experts stacked in one tensor are cut by expert parallelism, and whole in dicts and norms", "[runtime][tensor_parallel]") {
  on_ranks(4, [](Rank& rank) {
    const auto mesh = init_device_mesh(rank.world(), {2, 2}, {"ep", "edp"});
    const int64_t experts = 5, local = chunk_of(experts, mesh.get_local_rank(0), 2);
    const auto whole = seeded(2, [&] { return torch::randn({experts, 3, 4}); });
    nn::Module module;
    const auto handle = module.register_parameter("experts", whole.narrow(0, 3 * mesh.get_local_rank(0), local).clone());
    const auto dense = module.register_parameter("dense", torch::ones({6}));
    fully_shard(module, {.mesh = rank.mesh(),
                         .shard_placement_fn = [&](auto& name, auto&) -> std::optional<ShardPlacementResult> {
                           if (name != "experts") return std::nullopt;
                           return ShardPlacementResult{Shard{0}, mesh["edp"]};
                         },
                         .tensor_parallel_fn = [&](auto& name, auto&) -> std::optional<TensorParallel> {
                           if (name != "experts") return std::nullopt;
                           return TensorParallel{{Shard{0}}, {experts, 3, 4}, mesh["ep"]};
                         }});
    rank.check_identical(full_tensor(handle), whole, "all experts");
    rank.check_identical(state_dict(module).entries["experts"].value, whole, "in the dict");
    (handle.sum() * 2 + dense.sum()).backward();
    const double norm = get_total_norm(module.parameters());
    rank.check(std::abs(norm - std::sqrt(60 * 4 + 6)) < 1e-4, fmt::format("norm over all experts: {}", norm));
  });
}

}  // namespace
}  // namespace fsdp::test
