#include <catch2/catch.hpp>

#include <thread>

#include "support/models.hpp"

// Which collectives run, and in which order.

namespace fsdp::test {
namespace {

using Calls = std::vector<std::string>;

int64_t count(const Calls& calls, const std::string& call) {
  return std::count(calls.begin(), calls.end(), call);
}

/// Collectives of one forward and backward, without the optimizer.
Calls calls_of_step(const Rank& rank, ShardedChain& chain, int step = 0) {
  rank.log().clear();
  chain.step(rank.index(), step);
  auto calls = rank.calls();
  rank.log().clear();
  return calls;
}

TEST_CASE("each group uses one all-gather and one reduce-scatter a pass", "[runtime][order_of_collectives]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    for (int step = 0; step < 3; ++step) {
      auto calls = calls_of_step(rank, chain, step);
      auto what = fmt::format("step {}: {}", step, calls);
      for (auto layer : {"layer0", "layer1", "layer2"}) {
        // The backward of the first layer reads no weight: the batch needs no gradient.
        bool read_in_backward = std::string(layer) != "layer0";
        rank.check_equal(count(calls, fmt::format("all_gather {}", layer)), 1 + read_in_backward, what);
        rank.check_equal(count(calls, fmt::format("reduce_scatter {}", layer)), 1, what);
      }
      rank.check_equal(count(calls, "all_gather root"), 1, what);
      rank.check_equal(count(calls, "reduce_scatter root"), 1, what);
      rank.check_equal(calls.size(), size_t{10}, what);
    }
  });
}

TEST_CASE("in the first iteration nothing is known and nothing is prefetched in forward",
          "[runtime][order_of_collectives]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    std::vector<Calls> seen;
    chain.model->after_layer = [&](int) { seen.push_back(rank.calls()); };
    rank.log().clear();
    chain.step(rank.index());
    rank.check_equal(seen[0], Calls{"all_gather layer0"}, "after layer0");
    rank.check_equal(seen[1], Calls{"all_gather layer0", "all_gather layer1"}, "after layer1");
    rank.check_equal(seen[2], Calls{"all_gather layer0", "all_gather layer1", "all_gather layer2"}, "after layer2");
  });
}

TEST_CASE("from the second iteration on each group is gathered one group ahead of its use",
          "[runtime][order_of_collectives]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    calls_of_step(rank, chain);
    for (int step = 1; step < 3; ++step) {
      auto calls = calls_of_step(rank, chain, step);
      rank.check_equal(calls,
                       Calls{"all_gather layer0", "all_gather layer1", "all_gather layer2", "all_gather root",
                             "all_gather layer2", "all_gather layer1", "reduce_scatter root", "reduce_scatter layer2",
                             "reduce_scatter layer1", "reduce_scatter layer0"},
                       fmt::format("step {}", step));
    }
    std::vector<int64_t> gathers;
    chain.model->after_layer = [&](int) { gathers.push_back(rank.subjects_of("all_gather").size()); };
    calls_of_step(rank, chain, 3);
    rank.check_equal(gathers, std::vector<int64_t>{2, 3, 4}, "gathers launched once a layer is done");
  });
}

TEST_CASE("prefetch distance 0 gathers at the use, 2 gathers two groups ahead", "[runtime][order_of_collectives]") {
  on_ranks(2, [](Rank& rank) {
    for (int distance : {0, 2}) {
      ShardedChain chain(rank.mesh(), 4);
      chain.root[0].set_prefetch_distance(distance);
      calls_of_step(rank, chain);
      std::vector<int64_t> gathers;
      chain.model->after_layer = [&](int) { gathers.push_back(rank.subjects_of("all_gather").size()); };
      auto calls = calls_of_step(rank, chain, 1);
      auto expected = distance == 0 ? std::vector<int64_t>{1, 2, 3, 4} : std::vector<int64_t>{3, 4, 5, 5};
      if (distance == 2) gathers.back() = std::min<int64_t>(gathers.back(), 5);  // what comes after is backward
      rank.check_equal(gathers, expected, fmt::format("distance {}: {}", distance, calls));
      rank.check_equal(calls.size(), size_t{13}, "as many as without");
    }
  });
}

TEST_CASE("prefetch distance 0 has each backward gather after the reduction of the group before",
          "[runtime][order_of_collectives]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    chain.root[0].set_prefetch_distance(0);
    Calls expected{"all_gather layer0",   "all_gather layer1", "all_gather layer2",     "all_gather root",
                   "reduce_scatter root", "all_gather layer2", "reduce_scatter layer2", "all_gather layer1",
                   "reduce_scatter layer1", "reduce_scatter layer0"};
    for (int step = 0; step < 3; ++step)
      rank.check_equal(calls_of_step(rank, chain, step), expected, fmt::format("step {}", step));
  });
}

/// What one step of five layers does in backward at distance 1, and the most that is unsharded in it.
struct BackwardOfFive {
  explicit BackwardOfFive(Rank& rank, const std::function<void(ShardedChain&)>& change = {}) : chain(rank.mesh(), 5, 8) {
    if (change) change(chain);
    for (int step = 0; step < 2; ++step) calls_of_step(rank, chain, step);
    auto loss = chain.loss(rank.index(), 2);
    rank.log().clear();
    loss.backward();
    calls = rank.calls();
    peak_bytes = chain.root[0].report().last_step_peak_bytes;
  }
  ShardedChain chain;
  Calls calls;
  int64_t peak_bytes = 0;
};

TEST_CASE("backward gathers into the room of a group before it reduces that group, and needs no more room for it",
          "[runtime][order_of_collectives]") {
  on_ranks(2, [](Rank& rank) {
    const BackwardOfFive five(rank);
    rank.check_equal(five.calls,
                     Calls{"all_gather layer4", "all_gather layer3", "reduce_scatter root",  // which has been released
                           "all_gather layer2", "reduce_scatter layer4", "all_gather layer1", "reduce_scatter layer3",
                           "reduce_scatter layer2", "reduce_scatter layer1", "reduce_scatter layer0"},
                     "backward");
    rank.check_equal(five.peak_bytes, int64_t{2 * (8 * 8 + 8) * 4}, "two layers, as when each was gathered at the use of "
                                                                   "the one before");
  });
}

TEST_CASE("one debug read of a reduced parameter changes the order of that step and what is learned of it, not for ever",
          "[runtime][order_of_collectives]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh(), 5, 8);
    for (int step = 0; step < 2; ++step) calls_of_step(rank, chain, step);
    const auto usual = calls_of_step(rank, chain, 2);
    bool reads = true;
    chain.model->layers[1]->weight.register_hook([&](const at::Tensor&) {
      if (reads) chain.model->layers[4]->weight.sum();
    });
    const auto with_read = calls_of_step(rank, chain, 3);
    rank.check_equal(count(with_read, "all_gather layer4"), count(usual, "all_gather layer4") + 1, "gathered for the read");
    reads = false;
    for (int step = 4; step < 6; ++step) calls_of_step(rank, chain, step);
    rank.check_equal(calls_of_step(rank, chain, 6), usual, "as before");
  }));
}

TEST_CASE("a group whose room is not free when it is reduced has nothing gathered before that",
          "[runtime][order_of_collectives]") {
  on_ranks(2, [](Rank& rank) {
    const BackwardOfFive kept(rank, [](ShardedChain& chain) { chain.layers[4].set_reshard_after_backward(false); });
    const auto reduced = std::find(kept.calls.begin(), kept.calls.end(), "reduce_scatter layer4");
    rank.check_equal(count(Calls(kept.calls.begin(), reduced), "all_gather layer2"), 0,
                     fmt::format("layer4 stays: {}", kept.calls));
    const BackwardOfFive listed(rank, [](ShardedChain& chain) {
      chain.layers[3].set_modules_to_backward_prefetch({chain.layers[2]});
    });
    rank.check_equal(listed.calls,
                     Calls{"all_gather layer4", "all_gather layer3", "reduce_scatter root",
                           "reduce_scatter layer4", "all_gather layer2",  // by the list, at the use of layer3
                           "all_gather layer1", "reduce_scatter layer3",
                           "reduce_scatter layer2", "reduce_scatter layer1", "reduce_scatter layer0"},
                     "layer3 has a list");
  });
}

TEST_CASE("what backward reads after a group's last gradient is gathered as often with prefetch as without",
          "[runtime][order_of_collectives]") {
  // Backward reads `second`, has the bias's gradient, which is all there is, and reads `first`.
  struct FrozenWeights : torch::nn::Module {
    FrozenWeights() {
      first = register_parameter("first", torch::randn({6, 6}), /*requires_grad=*/false);
      bias = register_parameter("bias", torch::randn({6}));
      second = register_parameter("second", torch::randn({6, 6}), /*requires_grad=*/false);
    }
    at::Tensor first, bias, second;
  };
  struct Stack : torch::nn::Module {
    Stack() {
      first = register_module("first", torch::nn::Linear(6, 6));
      for (int i = 0; i < 4; ++i)
        frozen.push_back(register_module(fmt::format("frozen{}", i), std::make_shared<FrozenWeights>()));
    }
    at::Tensor forward(at::Tensor x) {
      x = first->forward(x);
      for (auto& part : frozen) x = torch::tanh(torch::mm(torch::mm(x, part->first) + part->bias, part->second));
      return x;
    }
    torch::nn::Linear first{nullptr};
    std::vector<std::shared_ptr<FrozenWeights>> frozen;
  };
  on_ranks(2, [](Rank& rank) {
    std::vector<int64_t> gathers;
    for (int distance : {0, 1}) {
      auto stack = seeded(3, [] { return std::make_shared<Stack>(); });
      for (auto& part : stack->frozen) fully_shard(*part, {.mesh = rank.mesh()});
      auto root = fully_shard(*stack, {.mesh = rank.mesh()});
      root.set_prefetch_distance(distance);
      for (int step = 0; step < 3; ++step) {
        rank.log().clear();
        stack->forward(Inputs(rank.index(), step).normal({3, 6})).sum().backward();
        stack->zero_grad();
      }
      gathers.push_back(static_cast<int64_t>(rank.subjects_of("all_gather").size()));
    }
    // The root once; each other in forward and in backward, where it stays for its second read, but that the last is there at
    // its begin.
    rank.check_equal(gathers, std::vector<int64_t>{1 + 4 * 2 - 1, 1 + 4 * 2 - 1}, "all-gathers of a step");
  });
}

TEST_CASE("the same options and uses give the same sequence, whatever the timing", "[runtime][order_of_collectives]") {
  std::vector<std::vector<Calls>> by_run(2);
  std::mutex mutex;
  for (int run = 0; run < 2; ++run) {
    on_ranks(3, [&](Rank& rank) {
      ShardedChain chain(rank.mesh());
      chain.model->after_layer = [&](int layer) {
        std::this_thread::sleep_for(std::chrono::milliseconds((run * 5 + rank.index() * 3 + layer) % 7));
      };
      Calls all;
      for (int step = 0; step < 3; ++step)
        for (auto& call : calls_of_step(rank, chain, step)) all.push_back(call);
      rank.check(!all.empty(), "something was recorded");
      std::lock_guard lock(mutex);
      by_run[run].push_back(all);
    });
  }
  for (auto& run : by_run) {
    REQUIRE(run.size() == 3);
    for (auto& calls : run) CHECK(calls == by_run[0][0]);
  }
}

TEST_CASE("a changed order is noticed, still correct, and learned again", "[runtime][order_of_collectives]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain(4);
    ShardedChain chain(rank.mesh(), 4);
    for (int step = 0; step < 2; ++step) calls_of_step(rank, chain, step);

    auto run_skipping = [&](std::vector<size_t> skipped, int step) {
      plain->skipped = chain.model->skipped = skipped;
      auto expected = averaged_gradients(plain, 2, step);
      rank.log().clear();
      chain.loss(rank.index(), step).backward();
      auto calls = rank.calls();
      check_gradients(rank, *chain.model, expected, fmt::format("step {}", step));
      chain.model->zero_grad();
      return calls;
    };
    run_skipping({1}, 2);
    run_skipping({1}, 3);
    auto learned = run_skipping({1}, 4);
    rank.check_equal(count(learned, "all_gather layer1"), 0, fmt::format("layer1 is not gathered any more: {}", learned));
    rank.check_equal(learned.size(), size_t{10}, "one all-gather a use, one reduce-scatter a group");
    rank.check_equal(run_skipping({1}, 5), learned, "and the order is stable");

    run_skipping({}, 6);
    run_skipping({}, 7);
    auto back = run_skipping({}, 8);
    rank.check_equal(back.size(), size_t{13}, fmt::format("all layers again: {}", back));
    rank.check_equal(std::vector<std::string>(back.begin(), back.begin() + 5),
                     Calls{"all_gather layer0", "all_gather layer1", "all_gather layer2", "all_gather layer3",
                           "all_gather root"},
                     "in their order");
  });
}

TEST_CASE("the order that alternates every step trains right", "[runtime][order_of_collectives]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain(4);
    ShardedChain chain(rank.mesh(), 4);
    for (int step = 0; step < 6; ++step) {
      plain->skipped = chain.model->skipped = step % 2 ? std::vector<size_t>{2} : std::vector<size_t>{0};
      auto expected = averaged_gradients(plain, 2, step);
      chain.loss(rank.index(), step).backward();
      check_gradients(rank, *chain.model, expected, fmt::format("step {}", step));
      chain.model->zero_grad();
    }
  });
}

TEST_CASE("explicit prefetch lists override the learned order", "[runtime][order_of_collectives]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh(), 4);
    chain.layers[0].set_modules_to_forward_prefetch({chain.layers[1], chain.layers[2]});
    chain.layers[3].set_modules_to_backward_prefetch({chain.layers[2], chain.layers[1]});
    std::vector<Calls> seen;
    chain.model->after_layer = [&](int) { seen.push_back(rank.subjects_of("all_gather")); };
    rank.log().clear();
    chain.loss(rank.index(), 0).backward();
    rank.check_equal(seen[0], Calls{"layer0", "layer1", "layer2"}, "both, from the first iteration on");
    auto calls = rank.calls();
    auto position = [&](const std::string& call, size_t from) {
      return std::find(calls.begin() + from, calls.end(), call) - calls.begin();
    };
    size_t backward = position("reduce_scatter root", 0);
    rank.check(position("all_gather layer1", backward) < position("reduce_scatter layer3", backward),
               fmt::format("layer1 is gathered while layer3 runs backward: {}", calls));
    rank.check(position("all_gather layer2", backward) < position("all_gather layer1", backward),
               fmt::format("in the order of the list: {}", calls));
    rank.check_equal(calls.size(), size_t{13}, "no gather more");
  });
}

TEST_CASE("a block with its own norms is gathered once in a forward, around the MLP it contains",
          "[runtime][order_of_collectives]") {
  struct Block : torch::nn::Module {
    Block() {
      before = register_module("before", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
      mlp = register_module("mlp", torch::nn::Linear(6, 6));
      after = register_module("after", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
    }
    at::Tensor forward(at::Tensor x) { return after->forward(x + mlp->forward(before->forward(x))); }
    torch::nn::LayerNorm before{nullptr}, after{nullptr};
    torch::nn::Linear mlp{nullptr};
  };
  struct Two : torch::nn::Module {
    Two() {
      first = register_module("first", std::make_shared<Block>());
      second = register_module("second", std::make_shared<Block>());
    }
    std::shared_ptr<Block> first, second;
  };
  on_ranks(2, [](Rank& rank) {
    Two net;
    for (auto& block : {net.first, net.second}) {
      fully_shard(block->mlp, {.mesh = rank.mesh()});
      fully_shard(*block, {.mesh = rank.mesh()});
    }
    fully_shard(net, {.mesh = rank.mesh()});
    for (int step = 0; step < 3; ++step) {
      rank.log().clear();
      Inputs inputs(rank.index(), step);
      auto x = inputs.normal({3, 6});
      auto loss = (net.second->forward(net.first->forward(x)) * x).sum();
      auto forward = rank.calls();
      loss.backward();
      auto calls = rank.calls();
      for (auto group : {"first", "first.mlp", "second", "second.mlp"}) {
        rank.check(count(forward, fmt::format("all_gather {}", group)) == 1,
                   fmt::format("step {}: {} once in forward: {}", step, group, forward));
        rank.check(count(calls, fmt::format("all_gather {}", group)) <= 2,
                   fmt::format("step {}: {} at most once more in backward: {}", step, group, calls));
        rank.check_equal(count(calls, fmt::format("reduce_scatter {}", group)), 1, "one reduction");
      }
    }
  });
}

TEST_CASE("an operator over two groups gathers each once", "[runtime][order_of_collectives]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh(), 2);
    for (int step = 0; step < 3; ++step) {
      rank.log().clear();
      auto joined = torch::cat({chain.model->layers[0]->weight, chain.model->layers[1]->weight});
      rank.check_equal(rank.subjects_of("all_gather"), Calls{"layer0", "layer1"}, fmt::format("step {}", step));
      joined.sum().backward();
      rank.check_equal(rank.subjects_of("reduce_scatter").size(), size_t{2}, "one reduction each");
    }
  });
}

TEST_CASE("a world that batches launches one grouped launch a group, with the same results",
          "[runtime][order_of_collectives]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain(2, 64);
    ShardedChain chain(rank.mesh(), 2, 64);
    for (int step = 0; step < 2; ++step) {
      rank.log().clear();
      chain.loss(rank.index(), step).backward();
      rank.check_equal(rank.log().calls.size(), size_t{7}, fmt::format("{}", rank.calls()));
      check_gradients(rank, *chain.model, averaged_gradients(plain, 2, step), fmt::format("step {}", step));
      chain.model->zero_grad();
    }
  }, {.launches_batches = true});
}

TEST_CASE("a simulated world of 1024 sees the same sequence as two threads", "[runtime][order_of_collectives]") {
  auto log = std::make_shared<CallLog>();
  auto world = recording(simulated_network({.world_size = 1024}), log);
  ShardedChain chain(init_device_mesh(world, {1024}, {"shard"}));
  Calls two_ranks;
  for (int step = 0; step < 2; ++step) {
    log->clear();
    chain.step(0, step);
  }
  Calls simulated;
  for (auto& call : log->calls) simulated.push_back(call.operation + " " + (call.subject.empty() ? "root" : call.subject));
  std::mutex mutex;
  on_ranks(2, [&](Rank& rank) {
    ShardedChain twin(rank.mesh());
    calls_of_step(rank, twin, 0);
    auto calls = calls_of_step(rank, twin, 1);
    rank.check(!calls.empty(), "something was recorded");
    std::lock_guard lock(mutex);
    two_ranks = calls;
  });
  CHECK(simulated == two_ranks);
}

}  // namespace
}  // namespace fsdp::test
