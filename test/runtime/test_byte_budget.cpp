#include <catch2/catch.hpp>

#include <random>

#include "support/counting_allocator.hpp"
#include "support/models.hpp"
#include "support/sample.hpp"

// A byte budget in place of reshard_after_forward. How a plan is made is tested in test/group.

namespace fsdp::test {
namespace {

constexpr int64_t kBudgetWidth = 8;
constexpr int64_t kLayerBytes = (kBudgetWidth * kBudgetWidth + kBudgetWidth) * 4;  // no padding over 2 or 4 ranks

/// Bytes gathered in one step, the order being known.
int64_t gathered_in_a_step(const Rank& rank, ShardedChain& chain, int step) {
  const auto before = statistics(chain.root[0]).gathered_bytes;
  chain.step(rank.index(), step);
  return statistics(chain.root[0]).gathered_bytes - before;
}

TEST_CASE("a step gathers less the larger the budget, and everything once with room for everything",
          "[runtime][byte_budget]") {
  on_ranks(4, [](Rank& rank) {
    int64_t last = INT64_MAX;
    for (int layers : {2, 3, 4, 5, 6, 7}) {
      ShardedChain chain(rank.mesh(), 6, kBudgetWidth);
      chain.root[0].set_unsharded_byte_budget(layers * kLayerBytes);
      for (int step = 0; step < 2; ++step) chain.step(rank.index(), step);
      const int64_t gathered = gathered_in_a_step(rank, chain, 2);
      rank.check_equal(gathered_in_a_step(rank, chain, 3), gathered, "every step alike");
      rank.check(gathered <= last, fmt::format("{} layers: {} bytes, less room: {}", layers, gathered, last));
      last = gathered;
    }
    ShardedChain kept(rank.mesh(), 6, kBudgetWidth, false);
    kept.step(rank.index());
    rank.check_equal(last, gathered_in_a_step(rank, kept, 1), "as if all were told to stay");
  });
}

TEST_CASE("at no time are more bytes unsharded than the budget allows", "[runtime][byte_budget]") {
  on_ranks(2, [](Rank& rank) {
    for (int distance : {0, 1, 2}) {
      ShardedChain chain(rank.mesh(), 6, kBudgetWidth);
      const int64_t budget = 4 * kLayerBytes + 100;
      chain.root[0].set_prefetch_distance(distance);
      chain.root[0].set_unsharded_byte_budget(budget);
      for (int step = 0; step < 4; ++step) {
        int64_t most = 0;
        auto look = [&] { most = std::max(most, parameter_bytes(chain.root[0]).unsharded); };
        chain.model->after_layer = [&](int) { look(); };
        auto loss = chain.loss(rank.index(), step);
        std::vector<unsigned> hooks;
        for (auto& layer : chain.model->layers)
          hooks.push_back(layer->weight.register_hook([&](const at::Tensor& gradient) { look(); return gradient; }));
        loss.backward();
        for (size_t i = 0; i < hooks.size(); ++i) chain.model->layers[i]->weight.remove_hook(hooks[i]);
        chain.model->zero_grad();
        if (step >= 2) rank.check(most <= budget, fmt::format("distance {}: {} bytes of {}", distance, most, budget));
      }
    }
  });
}

TEST_CASE("nor by the allocator, which sees the budget used and the runtime's own count confirmed",
          "[runtime][byte_budget][memory]") {
  // Sizes that no other tensor has, in steps that reduce in double.
  constexpr int64_t kWide = 48, kWideBytes = (kWide * kWide + kWide) * 4;
  install_counting_allocator();
  const auto step = [](Chain& model, int number) {
    Inputs inputs(0, number);
    model->forward(inputs.normal({4, kWide})).square().mean().backward();
    model->zero_grad();
  };
  auto plain = plain_chain(6, kWide);
  start_recording();
  step(plain, 0);
  const auto plain_events = recorded_events();
  for (const int distance : {0, 1, 2, 3})
    for (const int64_t layers : {3, 4, 5}) {
      CAPTURE(distance, layers);
      const auto world = simulated_network({.world_size = 4});
      ShardedChain chain(seeded(5, [&] { return Chain(6, kWide); }),
                         {.mesh = init_device_mesh(world, {4}, {"shard"}), .mp_policy = {.reduce_dtype = at::kDouble}});
      const int64_t budget = layers * kWideBytes + kWideBytes / 2;
      chain.root[0].set_prefetch_distance(distance);
      chain.root[0].set_unsharded_byte_budget(budget);
      const std::set<int64_t> gathered = {kWideBytes, chain.root[0].report().groups[0].unsharded_bytes};
      REQUIRE(peak_of_sizes(plain_events, gathered) == 0);
      for (const int number : {0, 1}) step(chain.model, number);
      for (const int number : {2, 3}) {
        start_recording();
        step(chain.model, number);
        const int64_t peak = peak_of_sizes(recorded_events(), gathered);
        CHECK(peak <= budget);
        CHECK(peak > budget - kWideBytes);
        CHECK(peak == chain.root[0].report().last_step_peak_bytes);
      }
    }
}

TEST_CASE("what lies behind the groups that stayed is gathered as soon as the first of them has made room",
          "[runtime][byte_budget]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh(), 6, kBudgetWidth);
    chain.root[0].set_unsharded_byte_budget(4 * kLayerBytes);  // layers 0 and 3 to 5 are there when forward ends
    for (int step = 0; step < 2; ++step) chain.step(rank.index(), step);
    auto loss = chain.loss(rank.index(), 2);
    rank.log().clear();
    loss.backward();
    rank.check_equal(rank.calls(), std::vector<std::string>{
        "all_gather layer2",  // four uses ahead, in the room that the root had
        "reduce_scatter root", "reduce_scatter layer5", "reduce_scatter layer4",
        "all_gather layer1",  // one is on its way at a time, beside the one that is used next
        "reduce_scatter layer3", "reduce_scatter layer2", "reduce_scatter layer1", "reduce_scatter layer0"}, "backward");
  });
}

TEST_CASE("explicit options stay instructions: what is told to go goes, what is told to stay stays",
          "[runtime][byte_budget]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh(), 4, kBudgetWidth);
    chain.layers[0].set_reshard_after_forward(false);
    chain.layers[2].set_reshard_after_forward(true);
    chain.root[0].set_unsharded_byte_budget(100 * kLayerBytes);
    for (int step = 0; step < 2; ++step) chain.step(rank.index(), step);
    rank.log().clear();
    auto loss = chain.loss(rank.index(), 2);
    rank.check(chain.layers[0].is_unsharded(), "told to stay");
    rank.check(chain.layers[1].is_unsharded(), "kept by the plan");
    rank.check(!chain.layers[2].is_unsharded(), "told to go");
    loss.backward();
    const auto gathered = rank.subjects_of("all_gather");
    rank.check_equal(std::count(gathered.begin(), gathered.end(), "layer2"), std::ptrdiff_t{2}, "twice");
    rank.check_equal(gathered.size(), size_t{6}, "the others once");
  });
}

TEST_CASE("a group that is told to stay makes room when its last backward is over, and in evaluation",
          "[runtime][byte_budget]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh(), 2, kBudgetWidth);
    chain.root[0].set_reshard_after_forward(false, Recurse::kNo);
    const int64_t head = (kBudgetWidth * 2 + 2) * 4;
    chain.root[0].set_unsharded_byte_budget(kLayerBytes + head - 1);  // any layer beside the root is too much
    const auto most = [&] { return chain.root[0].report().last_step_peak_bytes; };
    for (int step = 0; step < 4; ++step) {
      chain.step(rank.index(), step);
      rank.check(most() < kLayerBytes + head, fmt::format("step {}: {} bytes", step, most()));
    }
    {
      const auto scope = forward_scope(chain.root[0]);
      const torch::NoGradGuard no_grad;
      for (int batch = 0; batch < 2; ++batch) chain.loss(rank.index(), batch);
    }
    rank.check(most() < kLayerBytes + head, fmt::format("evaluation: {} bytes", most()));
    chain.loss(rank.index(), 0);
    chain.step(rank.index(), 1);
    rank.check(most() < kLayerBytes + head, fmt::format("two forwards: {} bytes", most()));
  });
}

TEST_CASE("whatever groups are told, each row of the outlook is what is measured under its budget",
          "[runtime][byte_budget]") {
  on_ranks(4, [](Rank& rank) {
    Sample sample(2);
    for (unsigned seed = 0; seed < 24; ++seed) {
      if (!sample.takes_next()) continue;
      std::mt19937 draw(seed);
      ShardedChain chain(rank.mesh(), 4, kBudgetWidth);
      auto& root = chain.root[0];
      const std::vector<ReshardAfterForward> told = {true, false, 2};
      for (auto* module : {&root, &chain.layers[0], &chain.layers[1], &chain.layers[2], &chain.layers[3]})
        if (const auto choice = draw() % 6; choice < told.size()) module->set_reshard_after_forward(told[choice], Recurse::kNo);
      root.set_prefetch_distance(static_cast<int>(draw() % 4));
      if (draw() % 4 == 0) chain.layers[draw() % 4].set_reshard_after_backward(false);
      for (int step = 0; step < 2; ++step) chain.step(rank.index(), step);
      int64_t before = INT64_MAX;
      for (const auto& row : root.report().outlook) {
        root.set_unsharded_byte_budget(row.budget_bytes);
        for (int step = 0; step < 2; ++step) chain.step(rank.index(), step);
        const auto found = root.report();
        const auto what = fmt::format("seed {}, budget {}", seed, row.budget_bytes);
        rank.check_equal(found.last_step.all_gathers, row.all_gathers, what + ": gathers");
        rank.check_equal(found.last_step.gathered_bytes, row.gathered_bytes, what + ": gathered bytes");
        rank.check(found.last_step_peak_bytes <= row.budget_bytes, fmt::format("{}: {}", what, found.last_step_peak_bytes));
        rank.check(row.gathered_bytes <= before, what + ": more memory, fewer gathers");
        before = row.gathered_bytes;
      }
    }
  });
}

TEST_CASE("training under any budget is like plain", "[runtime][byte_budget]") {
  for (double factor : {1.0, 2.0, 3.5})
    for (int world_size : {2, 3}) {
      trains_like_plain([] { return chain_workload(5, kBudgetWidth); },
                        {.world_size = world_size, .steps = 4, .micro_batches = 2, .budget_factor = factor});
      trains_like_plain([] { return chain_workload(5, kBudgetWidth); },
                        {.world_size = world_size, .steps = 4, .prefetch_distance = 2, .budget_factor = factor});
    }
}

TEST_CASE("an order that changes under a budget is still right, and planned anew", "[runtime][byte_budget]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh(), 5, kBudgetWidth);
    auto plain = plain_chain(5, kBudgetWidth);
    chain.root[0].set_unsharded_byte_budget(3 * kLayerBytes);
    for (int step = 0; step < 9; ++step) {
      chain.model->skipped = step < 3 ? std::vector<size_t>{} : step < 6 ? std::vector<size_t>{1, 3} : std::vector<size_t>{0};
      plain->skipped = chain.model->skipped;
      chain.model->zero_grad();
      chain.loss(rank.index(), step).backward();
      check_gradients(rank, *chain.model, averaged_gradients(plain, 2, step), fmt::format("step {}", step));
    }
  });
}

TEST_CASE("a budget smaller than one group is refused, one too small beside what must stay says what that is",
          "[runtime][byte_budget]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh(), 4, kBudgetWidth);
    auto& root = chain.root[0];
    rank.check_throws<UsageError>([&] { root.set_unsharded_byte_budget(10); },
                                  {"set_unsharded_byte_budget", std::to_string(kLayerBytes), "10"}, "10 bytes");
    rank.check_throws<StateError>([&] { chain.layers[0].set_unsharded_byte_budget(1 << 20); }, {"layer0", "root"}, "no root");
    chain.layers[0].set_reshard_after_forward(false);
    chain.layers[1].set_reshard_after_forward(false);
    root.set_unsharded_byte_budget(2 * kLayerBytes);
    chain.step(rank.index());  // shows the order
    for (const char* when : {"two that stay and one in use", "and again"})
      rank.check_throws<StateError>([&] { chain.step(rank.index()); }, {"budget", "layer0", "layer1", "raise the budget"}, when);
    root.set_unsharded_byte_budget(3 * kLayerBytes);
    chain.step(rank.index());
    root.set_unsharded_byte_budget(std::nullopt);
    chain.step(rank.index());
    rank.check(parameter_bytes(root).unsharded == 0, "nothing is left");
  });
}

}  // namespace
}  // namespace fsdp::test
