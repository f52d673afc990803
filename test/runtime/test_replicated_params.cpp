#include <catch2/catch.hpp>

#include "support/models.hpp"
#include "support/sample.hpp"
#include "support/draw.hpp"

// Parameters that are neither sharded nor ignored: replicated, their gradients averaged with the group's.

namespace fsdp::test {
namespace {

namespace nn = torch::nn;

/// A chain whose layers and root replicate some of their parameters: those whose bit is set in `which`.
Workload partly_replicated(int which, bool by_module) {
  Chain chain(3, 5);
  return {.module = chain.ptr(),
          .shard =
              [chain, which, by_module](const FullyShardOptions& given) {
                auto options = given;
                const auto parameters = chain->parameters();
                for (size_t i = 0; i < parameters.size(); ++i)
                  if (which >> i & 1) options.replicated_params.push_back(parameters[i]);
                if (by_module) options.replicated_modules = {chain->layers[1].ptr()};
                fully_shard(chain->layers[0], options);
                fully_shard(chain, options);
              },
          .loss = [chain](Inputs& in) mutable { return chain->forward(in.normal({4, 5})).square().mean(); }};
}

TEST_CASE("a module of which some parameters are replicated trains like plain", "[runtime][replicated_params]") {
  const uint64_t seed = draw_seed();
  INFO("FSDP_TEST_SEED=" << seed);
  Draw draw(seed);
  for (int i = 0; i < Sample::draws(40); ++i) {
    const auto which = static_cast<int>(draw.between(0, 255));
    const bool by_module = draw.between(0, 3) == 0;
    Training training{.world_size = static_cast<int>(draw.between(1, 8)), .steps = 3};
    if (training.world_size % 2 == 0 && draw.between(0, 1) == 0) training.replicas = 2;
    training.micro_batches = static_cast<int>(draw.between(1, 2));
    training.accumulation = draw.one_of<Accumulation>({Accumulation::kReduceEach, Accumulation::kSyncAtLast,
                                                       Accumulation::kAllReduceLast, Accumulation::kLastBackward});
    training.reshard_after_forward = draw.one_of<ReshardAfterForward>({{}, true, false, training.shard_ranks()});
    if (draw.between(0, 1) == 0) training.max_norm = 0.05;
    training.reduce_unused = draw.between(0, 3) == 0;
    if (draw.between(0, 2) == 0) training.adjust = [](FullyShardOptions& options) { options.layout = ParamLayout::kFlat; };
    CHECK(trains_like_plain([&] { return partly_replicated(which, by_module); }, training));
  }
}

TEST_CASE("replicated parameters stay whole, are never gathered and share one all-reduce", "[runtime][replicated_params]") {
  for (const int64_t replicas : {0, 2})
    on_ranks(4, [&](Rank& rank) {
      const auto mesh = replicas > 0 ? rank.hybrid(2, 2) : rank.mesh();
      auto model = plain_chain(1);
      const auto scale = model->layers[0]->bias, bias = model->head->bias;
      auto root = fully_shard(model, {.mesh = mesh, .replicated_params = {scale, bias}});
      for (const auto& handle : {scale, bias}) {
        const auto whole = dtensor_of(handle);
        rank.check(whole.mesh() == mesh, "on the module's mesh");
        rank.check(whole.placements() == std::vector<Placement>(static_cast<size_t>(mesh.ndim()), Replicate{}), "placements");
        rank.check(sharded(handle).sizes() == handle.sizes(), "whole");
      }
      for (int step = 0; step < 2; ++step) {
        rank.log().clear();
        Inputs inputs(rank.index(), step);
        model->forward(inputs.normal({2, 6})).sum().backward();
        const auto reduced = rank.subjects_of("all_reduce"), gathered = rank.subjects_of("all_gather");
        rank.check_equal(std::count(reduced.begin(), reduced.end(), "root [replicated]"), 1, "one all-reduce for both");
        rank.check_equal(std::count(gathered.begin(), gathered.end(), "root [replicated]"), 0, "no gather");
        rank.check_equal(rank.subjects_of("reduce_scatter"), std::vector<std::string>{"root"}, "the rest is reduced as ever");
      }
      rank.check_equal(statistics(root).reductions, int64_t{4}, "launches counted");
      rank.check(root.is_unsharded() == false, "the group that is cut is released");
      rank.check_equal(report(root).groups.back().layout, replicas > 0 ? "Replicate(), Replicate()" : "Replicate()", "report");
    });
}

TEST_CASE("groups over both dimensions are made once for a mesh", "[runtime][replicated_params]") {
  on_ranks(4, [](Rank& rank) {
    const auto mesh = rank.hybrid(2, 2);
    auto model = plain_chain(2);
    for (auto& layer : model->layers) fully_shard(layer, {.mesh = mesh, .replicated_params = {layer->bias}});
    fully_shard(model, {.mesh = mesh, .replicated_params = {model->head->bias}});
    std::set<std::string> groups;
    Inputs inputs(rank.index(), 0);
    rank.log().clear();
    model->forward(inputs.normal({2, 6})).sum().backward();
    for (const auto& call : rank.log().calls)
      if (call.subject.find("[replicated]") != std::string::npos) groups.insert(call.group);
    rank.check_equal(groups.size(), size_t{1}, "one communicator");
  });
}

TEST_CASE("replicated with sync, state dicts, clones and full parameters", "[runtime][replicated_params]") {
  on_ranks(4, [](Rank& rank) {
    const auto make = [](uint64_t seed) { return seeded(seed, [] { return Chain(2, 5); }); };
    auto plain = make(20), model = make(20 + static_cast<uint64_t>(rank.index()));
    fully_shard(model, {.mesh = rank.hybrid(2, 2), .replicated_params = {model->layers[0]->weight}, .sync_from_rank0 = true});
    const auto check = [&](const nn::Module& found, const std::string& what) {
      for (const auto& item : state_dict(found).entries)
        rank.check_identical(item.value().value, plain->named_parameters()[item.key()].detach(), what + ": " + item.key());
    };
    check(*model, "synchronised");
    auto other = make(3);
    fully_shard(other, {.mesh = rank.mesh(), .replicated_params = {other->head->weight}});
    load_state_dict(other, state_dict(model, {.kind = StateDictKind::kSharded}));
    check(*other, "from a sharded dict");
    load_state_dict(other, state_dict(model, {.rank0_only = true}), {.broadcast_from_rank0 = true});
    check(*other, "from the first rank's dict");
    FullParameters scope(model);
    for (const auto& param : model->named_parameters())
      rank.check_identical(param.value().detach(), plain->named_parameters()[param.key()].detach(), "shown: " + param.key());
  });
}

TEST_CASE("what is replicated and ignored at once is refused by name; replicate-only has nothing to set apart",
          "[runtime][replicated_params]") {
  on_ranks(2, [](Rank& rank) {
    auto model = plain_chain(2);
    const auto weight = model->layers[1]->weight;
    rank.check_throws<UsageError>(
        [&] { fully_shard(model, {.mesh = rank.mesh(), .ignored_params = {weight}, .replicated_params = {weight}}); },
        {"layer1.weight", "replicated", "ignored"}, "both");
    rank.check_throws<UsageError>(
        [&] { fully_shard(model, {.mesh = rank.mesh(), .ignored_modules = {model->layers[1].ptr()}, .replicated_modules = {model->layers[1].ptr()}}); },
        {"layer1.", "replicated"}, "both, by module");
    rank.check(model->parameters()[0].is_same(model->layers[0]->weight), "nothing has changed");
    auto root = fully_shard(model, {.mesh = rank.mesh(), .replicated_params = {weight}, .replicate_only = true});
    rank.check_equal(report(root).groups.size(), size_t{1}, "one group");
  });
  on_ranks(4, [](Rank& rank) {
    auto model = plain_chain(1);
    const auto mesh = rank.hybrid(2, 2);
    const auto of_groups = DeviceMesh::from_group({mesh.get_group("shard"), mesh.get_group("replicate")});
    rank.check_throws<UsageError>([&] { fully_shard(model, {.mesh = of_groups, .replicated_params = {model->head->bias}}); },
                                  {"made from groups"}, "no world to make a group from");
  });
}

}  // namespace
}  // namespace fsdp::test
