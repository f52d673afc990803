#include <catch2/catch.hpp>

#include "support/counting_allocator.hpp"
#include "support/models.hpp"

// What is unsharded when.

namespace fsdp::test {
namespace {

using Flags = std::vector<bool>;

Flags unsharded(const std::vector<FSDPModule>& modules) {
  Flags flags;
  for (auto& module : modules) flags.push_back(module.is_unsharded());
  return flags;
}

int64_t how_many(const Flags& flags) { return std::count(flags.begin(), flags.end(), true); }

TEST_CASE("in a first pass a group goes when something that is not inside it is touched", "[runtime][release]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    std::vector<Flags> seen;
    chain.model->after_layer = [&](int) { seen.push_back(unsharded(chain.layers)); };
    auto loss = chain.loss(rank.index(), 0);
    rank.check_equal(seen, std::vector<Flags>{{true, false, false}, {false, true, false}, {false, false, true}},
                     "one layer at a time");
    rank.check(chain.root[0].is_unsharded(), "the root is kept for backward");
    loss.backward();
    rank.check_equal(unsharded(chain.layers), Flags{false, false, false}, "after backward");
    rank.check(!chain.root[0].is_unsharded(), "the root after backward");
  });
}

TEST_CASE("never more than two groups are unsharded beside the root, however far the prefetch",
          "[runtime][release]") {
  on_ranks(2, [](Rank& rank) {
    for (int distance : {0, 1, 2, 3, 5}) {
      ShardedChain chain(rank.mesh(), 6);
      chain.root[0].set_prefetch_distance(distance);
      int64_t most = 0;
      auto look = [&] { most = std::max(most, how_many(unsharded(chain.layers))); };
      chain.model->after_layer = [&](int) { look(); };
      for (auto& layer : chain.model->layers) layer->weight.register_hook([&](at::Tensor) { look(); });
      for (int step = 0; step < 3; ++step) chain.step(rank.index(), step);
      rank.check(most >= 1 && most <= (distance == 0 ? 1 : 2), fmt::format("distance {}: {} at most", distance, most));
    }
  });
}

/// Bytes of a layer that are like no other tensor's in a step that reduces in double.
constexpr int64_t kMeasuredWidth = 48;
constexpr int64_t kMeasuredBytes = (kMeasuredWidth * kMeasuredWidth + kMeasuredWidth) * 4;

TEST_CASE("the memory taken for groups is that of one in use and of those gathered ahead, by the allocator",
          "[runtime][release][memory]") {
  install_counting_allocator();
  const auto step = [](auto& model, int number) {
    Inputs inputs(0, number);
    model->forward(inputs.normal({4, kMeasuredWidth})).square().mean().backward();
    model->zero_grad();
  };
  auto plain = plain_chain(7, kMeasuredWidth);
  start_recording();
  step(plain, 0);
  REQUIRE(peak_of_sizes(recorded_events(), {kMeasuredBytes}) == 0);
  for (const int distance : {0, 1, 2, 3, 4}) {
    CAPTURE(distance);
    const auto world = simulated_network({.world_size = 4});
    ShardedChain chain(seeded(5, [] { return Chain(7, kMeasuredWidth); }),
                       {.mesh = init_device_mesh(world, {4}, {"shard"}), .mp_policy = {.reduce_dtype = at::kDouble}});
    chain.root[0].set_prefetch_distance(distance);
    start_recording();
    step(chain.model, 0);
    CHECK(peak_of_sizes(recorded_events(), {kMeasuredBytes}) == kMeasuredBytes);  // nobody knows the order yet
    start_recording();
    for (const int number : {1, 2, 3}) step(chain.model, number);
    CHECK(peak_of_sizes(recorded_events(), {kMeasuredBytes}) == (1 + distance) * kMeasuredBytes);
  }
}

TEST_CASE("reshard_after_forward false keeps a group until backward and gathers it once", "[runtime][release]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh(), 3, 6, false);
    for (int step = 0; step < 3; ++step) {
      rank.log().clear();
      auto loss = chain.loss(rank.index(), step);
      rank.check_equal(unsharded(chain.layers), Flags{true, true, true}, "kept");
      loss.backward();
      rank.check_equal(unsharded(chain.layers), Flags{false, false, false}, "released");
      rank.check_equal(rank.subjects_of("all_gather"), std::vector<std::string>{"layer0", "layer1", "layer2", "root"},
                       fmt::format("step {}: gathered once", step));
      rank.check_equal(rank.subjects_of("reduce_scatter").size(), size_t{4}, "reduced once");
    }
  });
}

TEST_CASE("reshard_after_forward true on the root releases it too", "[runtime][release]") {
  on_ranks(2, [](Rank& rank) {
    torch::nn::Linear first(3, 3), second(3, 3);
    torch::nn::Sequential net(first, second);
    fully_shard(first, {.mesh = rank.mesh(), .reshard_after_forward = true});
    auto root = fully_shard(net, {.mesh = rank.mesh(), .reshard_after_forward = true});
    for (int step = 0; step < 3; ++step) {
      rank.log().clear();
      net->forward(torch::ones({1, 3})).sum().backward();
      rank.check(!root.is_unsharded(), "released");
      rank.check_equal(rank.subjects_of("reduce_scatter").size(), size_t{2}, "reduced once each");
    }
    rank.check(root.is_root(), "it is the root");
  });
}

TEST_CASE("set_reshard_after_forward changes it later, for one module or for all below", "[runtime][release]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh(), 2);
    chain.step(rank.index(), 0);
    chain.layers[0].set_reshard_after_forward(false);
    auto loss = chain.loss(rank.index(), 1);
    rank.check_equal(unsharded(chain.layers), Flags{true, false}, "one kept");
    loss.backward();
    chain.root[0].set_reshard_after_forward(false);
    loss = chain.loss(rank.index(), 2);
    rank.check_equal(unsharded(chain.layers), Flags{true, true}, "all kept");
    loss.backward();
    rank.check_equal(unsharded(chain.layers), Flags{false, false}, "released");
  });
}

TEST_CASE("set_reshard_after_backward(false) keeps parameters for the next micro-batch", "[runtime][release]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    chain.root[0].set_reshard_after_backward(false);
    chain.loss(rank.index(), 0).backward();
    auto kept = unsharded(chain.layers);  // but for layer0, which backward does not read
    rank.check(kept[1] && kept[2] && chain.root[0].is_unsharded(), fmt::format("kept after backward: {}", kept));
    chain.model->zero_grad();
    chain.root[0].set_reshard_after_backward(true);
    chain.loss(rank.index(), 1).backward();
    check_gradients(rank, *chain.model, averaged_gradients(plain, 2, 1), "the next one");
    rank.check_equal(unsharded(chain.layers), Flags{false, false, false}, "released");
  });
}

TEST_CASE("parameters kept after backward are gathered anew once the optimizer has written", "[runtime][release]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    chain.root[0].set_reshard_after_backward(false);
    torch::optim::SGD sgd(chain.model->parameters(), 0.5), plain_sgd(plain->parameters(), 0.5);
    for (int step = 0; step < 3; ++step) {
      auto expected = averaged_gradients(plain, 2, step);
      for (size_t i = 0; i < expected.size(); ++i) plain->parameters()[i].mutable_grad() = expected[i].second;
      chain.model->zero_grad();
      chain.loss(rank.index(), step).backward();
      check_gradients(rank, *chain.model, expected, fmt::format("step {}", step));
      sgd.step();
      plain_sgd.step();
    }
  });
}

TEST_CASE("unshard by hand is kept until reshard, and a second unshard is free", "[runtime][release]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    chain.layers[1].unshard();
    chain.layers[1].unshard();
    rank.check_equal(rank.subjects_of("all_gather"), std::vector<std::string>{"layer1"}, "one gather");
    {
      at::NoGradGuard no_grad;
      rank.check_identical(chain.model->layers[1]->weight * 1, plain->layers[1]->weight * 1, "its values");
    }
    rank.check(chain.layers[1].is_unsharded(), "kept");
    auto handle = chain.layers[2].unshard_async();
    handle.wait();
    handle.wait();
    rank.check(chain.layers[2].is_unsharded(), "by the handle");
    for (auto& layer : chain.layers) layer.reshard();
    rank.check_equal(unsharded(chain.layers), Flags{false, false, false}, "released");
    rank.check_equal(rank.log().calls.size(), size_t{2}, "two gathers in all");
    auto pending = chain.layers[0].unshard_async();
    at::NoGradGuard no_grad;
    rank.check_identical(chain.model->layers[0]->weight + 0, plain->layers[0]->weight + 0, "a touch waits by itself");
    pending.wait();
    UnshardHandle().wait();
  });
}

TEST_CASE("modules unsharded by hand ahead of forward train right", "[runtime][release]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    for (int step = 0; step < 3; ++step) {
      rank.log().clear();
      auto pending = chain.layers[0].unshard_async();
      chain.root[0].unshard();
      chain.loss(rank.index(), step).backward();
      check_gradients(rank, *chain.model, averaged_gradients(plain, 2, step), fmt::format("step {}", step));
      chain.model->zero_grad();
      rank.check(!chain.layers[0].is_unsharded() && !chain.root[0].is_unsharded(), "released at the end of backward");
    }
  });
}

TEST_CASE("set_unshard_in_backward(false) leaves a module's gather to its use", "[runtime][release]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    chain.layers[1].set_unshard_in_backward(false);
    for (int step = 0; step < 3; ++step) {
      rank.log().clear();
      chain.loss(rank.index(), step).backward();
      check_gradients(rank, *chain.model, averaged_gradients(plain, 2, step), fmt::format("step {}", step));
      chain.model->zero_grad();
      auto calls = rank.calls();
      auto at = [&](const std::string& call) { return std::find(calls.rbegin(), calls.rend(), call) - calls.rbegin(); };
      rank.check(at("all_gather layer1") < at("reduce_scatter layer2"),
                 fmt::format("step {}: not ahead of its use: {}", step, calls));
    }
  });
}

}  // namespace
}  // namespace fsdp::test
