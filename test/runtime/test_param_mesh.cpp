#include <catch2/catch.hpp>

#include "support/expert_model.hpp"
#include "support/sample.hpp"
#include "support/draw.hpp"

// Parameters on a mesh of their own, beside those of their module's mesh.

namespace fsdp::test {
namespace {

namespace nn = torch::nn;
using at::Tensor;

double norm_of(const EpNet& plain) {
  double sum = 0;
  for (const auto& param : plain->parameters()) sum += param.grad().to(at::kDouble).square().sum().item<double>();
  return std::sqrt(sum);
}

void trains_like_plain(Rank& rank, const EpCase& c) {
  EpModel ep(rank, c);
  auto root = ep.shard(ep.options(c));
  root.set_prefetch_distance(c.prefetch_distance);
  const auto options = torch::optim::AdamWOptions(2e-2).eps(1e-2).weight_decay(0.1);
  torch::optim::AdamW optimizer(ep.model->parameters(), options), expected_optimizer(ep.plain->parameters(), options);
  const auto expected = ep.plain->named_parameters();
  for (int step = 0; step < 3; ++step) {
    const auto what = fmt::format("{}: step {}: ", c.text(), step);
    optimizer.zero_grad();
    const auto losses = plain_backward(ep.plain, c, step);
    const auto loss = ep.model->loss(rank.index(), step, 0);
    loss.backward();
    rank.check_close(loss.detach(), losses[static_cast<size_t>(rank.index())].detach(), what + "loss");
    for (const auto& param : ep.model->named_parameters())
      rank.check_close(full_grad(param.value()), expected[plain_name(param.key(), ep.expert)].grad(),
                       what + "gradient of " + param.key());
    if (c.max_norm) {
      const double norm = norm_of(ep.plain), found = clip_grad_norm_(ep.model->parameters(), *c.max_norm);
      rank.check(std::abs(norm - found) <= 1e-5 * norm, fmt::format("{}norm: expected {}, found {}", what, norm, found));
      torch::nn::utils::clip_grad_norm_(ep.plain->parameters(), *c.max_norm);
    }
    optimizer.step();
    expected_optimizer.step();
    for (const auto& param : ep.model->named_parameters())
      rank.check_close(full_tensor(param.value()), expected[plain_name(param.key(), ep.expert)].detach(),
                       what + "weight " + param.key());
  }
}

TEST_CASE("experts on a mesh of their own train like the plain model in which each rank's batch passes its experts",
          "[runtime][param_mesh]") {
  const uint64_t seed = draw_seed();
  INFO("FSDP_TEST_SEED=" << seed);
  Draw draw(seed);
  const std::vector<std::pair<int64_t, int64_t>> shapes{{2, 2}, {2, 1}, {1, 2}, {2, 3}, {3, 2}, {2, 4}, {4, 2}, {4, 1}};
  for (int i = 0; i < Sample::draws(16); ++i) {
    const auto& [ep, edp] = shapes[static_cast<size_t>(i) % shapes.size()];
    EpCase c{.ep = ep, .edp = edp, .is_even = draw.between(0, 1) == 0};
    if (c.ranks() % 2 == 0 && draw.between(0, 2) == 0) c.replicas = 2;
    if (draw.between(0, 1) == 0) c.dim = draw.between(-2, 1);
    if (draw.between(0, 1) == 0) c.max_norm = 0.05;
    c.reshard = draw.one_of<ReshardAfterForward>({{}, true, false, 1});
    c.prefetch_distance = static_cast<int>(draw.between(0, 2));
    CHECK(on_ranks(c.ranks(), [&](Rank& rank) { trains_like_plain(rank, c); }));
  }
}

TEST_CASE("micro-batches add up in every group, however they are reduced", "[runtime][param_mesh]") {
  const EpCase c{.replicas = 2};
  for (const auto accumulation : {Accumulation::kReduceEach, Accumulation::kSyncAtLast, Accumulation::kAllReduceLast, Accumulation::kLastBackward})
    on_ranks(4, [&](Rank& rank) {
      EpModel ep(rank, c);
      auto root = ep.shard(ep.options(c));
      std::vector<Tensor> expected;
      for (int micro = 0; micro < 3; ++micro) {
        const bool is_last = micro == 2;
        if (accumulation == Accumulation::kSyncAtLast) root.set_requires_gradient_sync(is_last);
        if (accumulation == Accumulation::kAllReduceLast) root.set_requires_all_reduce(is_last);
        if (accumulation == Accumulation::kLastBackward) root.set_is_last_backward(is_last);
        ep.model->loss(rank.index(), micro, 0).backward();
        plain_backward(ep.plain, c, micro);
        const auto parameters = ep.plain->parameters();
        for (size_t i = 0; i < parameters.size(); ++i)
          if (micro == 0)
            expected.push_back(parameters[i].grad().clone());
          else
            expected[i] += parameters[i].grad();
      }
      const auto names = ep.plain->named_parameters();
      for (const auto& param : ep.model->named_parameters())
        for (size_t i = 0; i < names.size(); ++i)
          if (names[i].key() == plain_name(param.key(), ep.expert))
            rank.check_close(full_grad(param.value()), expected[i], fmt::format("{}: {}", static_cast<int>(accumulation), param.key()));
    });
}

TEST_CASE("one module owns a group for each mesh, gathered and reduced apart, by names that differ",
          "[runtime][param_mesh]") {
  const EpCase c;
  on_ranks(4, [&](Rank& rank) {
    EpModel ep(rank, c);
    auto root = ep.shard(ep.options(c));
    const auto block = *find_fsdp_module(*ep.model->blocks[1]);
    for (int step = 0; step < 3; ++step) {
      rank.log().clear();
      ep.model->loss(rank.index(), step, 0).backward();
      std::map<std::string, std::set<std::string>> groups;  // by subject
      for (const auto& call : rank.log().calls) groups[call.subject].insert(call.group);
      const std::set<std::string> all{rank.mesh().get_group()->name()}, edp{ep.mesh.get_group("edp")->name()};
      rank.check(groups["blocks.1"] == all, "the dense layer goes over all ranks");
      rank.check(groups["blocks.1 [edp]"] == edp, "the expert over its own");
      const auto reduced = rank.subjects_of("reduce_scatter");
      rank.check_equal(reduced.size(), size_t{5}, "two groups for each block, one for the root");
    }
    const auto shown = report(root);
    std::vector<std::string> names;
    for (const auto& group : shown.groups) names.push_back(group.name);
    rank.check_equal(names, std::vector<std::string>{"root", "blocks.0", "blocks.0 [edp]", "blocks.1", "blocks.1 [edp]"},
                     "groups in the report");
    rank.check(block.mesh() == rank.mesh() && block.placements() == std::vector<Placement>{Shard{0}}, "the module's own mesh");
    auto expert = ep.model->blocks[1]->as<EpBlockImpl>()->experts[0]->parameters()[0];
    rank.check(dtensor_of(expert).mesh() == ep.mesh["edp"], "the expert's mesh");
  });
}

TEST_CASE("the controls of a module act on all of its groups", "[runtime][param_mesh]") {
  const EpCase c{.reshard = true};
  on_ranks(4, [&](Rank& rank) {
    EpModel ep(rank, c);
    auto root = ep.shard(ep.options(c));
    auto first = *find_fsdp_module(*ep.model->blocks[0]), second = *find_fsdp_module(*ep.model->blocks[1]);
    rank.log().clear();
    second.unshard();
    rank.check_equal(rank.subjects_of("all_gather"), std::vector<std::string>{"blocks.1", "blocks.1 [edp]"}, "unshard");
    rank.check(second.is_unsharded() && !first.is_unsharded(), "is_unsharded");
    second.reshard();
    rank.check(!second.is_unsharded(), "reshard");
    auto handle = first.unshard_async();
    handle.wait();
    rank.check(first.is_unsharded(), "unshard_async");
    first.reshard();

    // Both groups are gathered when the module before is first used.
    first.set_modules_to_forward_prefetch({second});
    rank.log().clear();
    ep.model->loss(rank.index(), 0, 0).backward();
    const auto gathers = rank.subjects_of("all_gather");
    const auto position = [&](const std::string& name) { return std::find(gathers.begin(), gathers.end(), name) - gathers.begin(); };
    rank.check(position("blocks.1") < position("blocks.0 [edp]") && position("blocks.1 [edp]") < position("blocks.0 [edp]"),
               fmt::format("prefetched: {}", gathers));

    root.set_gradient_divide_factor(1);
    ep.model->zero_grad();
    plain_backward(ep.plain, c, 1);
    ep.model->loss(rank.index(), 1, 0).backward();
    for (const auto& param : ep.model->named_parameters()) {
      const double ranks = param.key().find("expert") != std::string::npos ? 2 : 4;
      rank.check_close(full_grad(param.value()), ep.plain->named_parameters()[plain_name(param.key(), ep.expert)].grad() * ranks,
                       "a divide factor is every group's: " + param.key());
    }
  });
}

TEST_CASE("an integer reshard has to fit every mesh, and the error names the one it does not", "[runtime][param_mesh]") {
  const EpCase c{.ep = 2, .edp = 4};
  on_ranks(8, [&](Rank& rank) {
    EpModel ep(rank, c);
    auto options = ep.options(c);
    options.reshard_after_forward = 8;
    const auto before = ep.model->blocks[0]->parameters();
    rank.check_throws<UsageError>([&] { fully_shard(*ep.model->blocks[0], options); }, {"8", "edp=4", "1, 2, 4"}, "at once");
    for (size_t i = 0; i < before.size(); ++i)
      rank.check(ep.model->blocks[0]->parameters()[i].is_same(before[i]), "nothing has changed");
    options.reshard_after_forward = 2;
    auto block = fully_shard(*ep.model->blocks[0], options);
    rank.check_throws<UsageError>([&] { block.set_reshard_after_forward(8); }, {"8", "edp=4"}, "by the control");
    block.set_reshard_after_forward(4);
  });
  for (int n : {2, 4})
    CHECK(on_ranks(8, [&](Rank& rank) { trains_like_plain(rank, {.ep = 2, .edp = 4, .reshard = n}); }));
}

TEST_CASE("ranks with other experts agree in the schedule check, also before every collective", "[runtime][param_mesh]") {
  on_ranks(4, [](Rank& rank) {
    const EpCase c{.is_even = false};
    EpModel ep(rank, c);
    auto root = ep.shard(ep.options(c));
    set_schedule_check(root, {.before_every_collective = true});
    for (int step = 0; step < 2; ++step) {
      ep.model->loss(rank.index(), step, 0).backward();
      rank.check(ep.model->head->bias.defined(), "no disagreement");
    }
  });
}

TEST_CASE("a mesh of its own may be of two dimensions, and replicates on the first", "[runtime][param_mesh]") {
  on_ranks(4, [](Rank& rank) {
    auto plain = plain_chain();
    auto model = plain_chain();
    const auto hybrid = rank.hybrid(2, 2);
    fully_shard(model, {.mesh = rank.mesh(), .shard_placement_fn = [&](auto& name, auto&) -> std::optional<ShardPlacementResult> {
                          if (name.starts_with("layer1")) return ShardPlacementResult{Shard{0}, hybrid};
                          return std::nullopt;
                        }});
    const auto expected = averaged_gradients(plain, 4);
    Inputs inputs(rank.index(), 0);
    rank.log().clear();
    model->forward(inputs.normal({4, 6})).square().mean().backward();
    rank.check_equal(rank.subjects_of("all_reduce"), std::vector<std::string>{"root [replicate, shard]"}, "replicas of one group");
    const auto parameters = unique_parameters(*model);
    for (size_t i = 0; i < parameters.size(); ++i)
      rank.check_close(grad_dtensor_of(parameters[i].second).full_tensor(), expected[i].second, parameters[i].first);
  });
}

}  // namespace
}  // namespace fsdp::test
