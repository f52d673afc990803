#include <catch2/catch.hpp>

#include <limits>

#include "support/models.hpp"

// When reductions begin that have a communicator of their own, and what a measurement chooses.

namespace fsdp::test {
namespace {

using Calls = std::vector<std::string>;
using Start = ReduceScatterStart;

constexpr auto& kStarts = kReduceScatterStarts;

void set_apart(FSDPModule& root, Start start) {
  root.set_separate_reduce_scatter_group();
  root.set_reduce_scatter_start(start);
  root.set_reduce_scatter_max_input_buffers(2);
}

/// One rank's chain of five equal layers.
struct Five {
  Five(Rank& rank, Start start) : Five(rank) { set_apart(chain.root[0], start); }
  explicit Five(Rank& rank) : rank(rank), chain(rank.mesh(), 5) {}

  /// Of the next step. Beside collectives: the moment at which a layer's gradient is there, before anything is launched for it.
  Calls backward() {
    std::vector<unsigned> hooks;
    Calls calls;
    size_t seen = 0;
    const auto take_calls = [&] {
      const auto all = rank.calls();
      calls.insert(calls.end(), all.begin() + static_cast<ptrdiff_t>(seen), all.end());
      seen = all.size();
    };
    for (size_t i = 0; i < chain.model->layers.size(); ++i)
      hooks.push_back(chain.model->layers[i]->weight.register_hook([&, i](const at::Tensor&) {
        take_calls();
        calls.push_back(fmt::format("gradient layer{}", i));
      }));
    auto loss = chain.loss(rank.index(), step++);
    rank.log().clear();
    loss.backward();
    take_calls();
    for (size_t i = 0; i < hooks.size(); ++i) chain.model->layers[i]->weight.remove_hook(hooks[i]);
    chain.model->zero_grad();
    return calls;
  }

  /// Of a step that follows the learned order and has the buffers of those before it.
  Calls learned_backward() {
    for (int i = 0; i < 3; ++i) backward();
    return backward();
  }

  Rank& rank;
  ShardedChain chain;
  int step = 0;
};

TEST_CASE("reductions train as the plain model does, whenever they start", "[runtime][reduce_scatter_start]") {
  for (const auto start : kStarts) {
    CAPTURE(name_of(start));
    const auto control = [start](FSDPModule& root) { set_apart(root, start); };
    for (const int world_size : {1, 2, 3}) trains_like_plain(chain_with(control), {.world_size = world_size, .steps = 4});
    trains_like_plain(chain_with(control), {.world_size = 4, .replicas = 2, .steps = 4, .micro_batches = 2});
    for (const auto accumulation : {Accumulation::kAllReduceLast, Accumulation::kLastBackward})
      trains_like_plain(chain_with(control), {.world_size = 2, .steps = 4, .micro_batches = 3, .accumulation = accumulation});
    trains_like_plain(chain_with(control), {.world_size = 2, .steps = 4, .prefetch_distance = 3, .launches_batches = true});
    trains_like_plain(chain_with(control), {.world_size = 2, .steps = 4, .budget_factor = 2.5});
  }
}

TEST_CASE("a gather over another communicator goes out before the gradients are packed whose room it takes",
          "[runtime][reduce_scatter_start]") {
  // The first two are the head's, which is the root's, and are here when backward begins; both ways.
  on_ranks(2, [](Rank& rank) {
    Five five(rank, Start::kBySize);
    rank.check_equal(five.learned_backward(),
                     Calls{"all_gather layer4", "all_gather layer3", "reduce_scatter root", "gradient layer4",
                           "all_gather layer2", "reduce_scatter layer4", "gradient layer3", "all_gather layer1",
                           "reduce_scatter layer3", "gradient layer2", "reduce_scatter layer2", "gradient layer1",
                           "reduce_scatter layer1", "gradient layer0", "reduce_scatter layer0"},
                     "equal layers: none waits");
  });
}

TEST_CASE("the first reduction of a backward waits for the next group's backward, the others for nothing",
          "[runtime][reduce_scatter_start]") {
  on_ranks(2, [](Rank& rank) {
    Five five(rank, Start::kFirstAfterNextBackward);
    for (int step = 0; step < 3; ++step) five.backward();
    for (int step = 0; step < 2; ++step)
      rank.check_equal(five.backward(),
                       Calls{"all_gather layer4", "all_gather layer3", "gradient layer4", "reduce_scatter root",
                             "all_gather layer2", "reduce_scatter layer4", "gradient layer3", "all_gather layer1",
                             "reduce_scatter layer3", "gradient layer2", "reduce_scatter layer2", "gradient layer1",
                             "reduce_scatter layer1", "gradient layer0", "reduce_scatter layer0"},
                       fmt::format("step {}", step));
  });
}

TEST_CASE("where the host alone can wait, the first reduction waits for the use of what is gathered",
          "[runtime][reduce_scatter_start]") {
  on_ranks(2, [](Rank& rank) {
    Five five(rank, Start::kFirstAfterAllGather);
    rank.check_equal(five.learned_backward(),
                     Calls{"all_gather layer4", "all_gather layer3", "gradient layer4", "all_gather layer2",
                           "reduce_scatter root", "reduce_scatter layer4",  // layer3 is used
                           "gradient layer3", "all_gather layer1", "reduce_scatter layer3", "gradient layer2",
                           "reduce_scatter layer2", "gradient layer1", "reduce_scatter layer1", "gradient layer0",
                           "reduce_scatter layer0"},
                     "backward");
  });
}

TEST_CASE("without a communicator of their own reductions start at once", "[runtime][reduce_scatter_start]") {
  on_ranks(2, [](Rank& rank) {
    Five plain(rank);
    const auto expected = plain.learned_backward();
    for (const auto start : kStarts) {
      Five five(rank);
      five.chain.root[0].set_reduce_scatter_start(start);
      rank.check_equal(five.learned_backward(), expected, name_of(start));
    }
  });
}

/// Collectives of the third step over a network that takes 10 us for each, with layers that compute in no time.
std::map<std::string, std::pair<int64_t, int64_t>> times_on_a_network(Start start) {
  const auto log = std::make_shared<std::vector<SimulatedTransfer>>();
  const auto clock = virtual_clock();
  const auto world = simulated_network({.world_size = 2, .latency_us = 10, .clock = clock, .log = log});
  ShardedChain chain(init_device_mesh(world, {2}, {"shard"}), 5);
  set_apart(chain.root[0], start);
  for (int step = 0; step < 2; ++step) chain.step(0, step);
  auto loss = chain.loss(0, 2);
  log->clear();
  const int64_t begin = clock->now_ns();
  loss.backward();
  std::map<std::string, std::pair<int64_t, int64_t>> times;
  for (const auto& transfer : *log)
    times[transfer.operation + " " + transfer.subject] = {(transfer.begin_ns - begin) / 1000,
                                                          (transfer.end_ns - begin) / 1000};
  return times;
}

TEST_CASE("where collectives can wait for each other, the first reduction begins when the gather beside it has arrived",
          "[runtime][reduce_scatter_start]") {
  auto times = times_on_a_network(Start::kBySize);
  CHECK(times["all_gather layer3"] == std::pair<int64_t, int64_t>(10, 20));
  CHECK(times["reduce_scatter root"].first < 10);
  times = times_on_a_network(Start::kFirstAfterAllGather);
  CHECK(times["all_gather layer3"] == std::pair<int64_t, int64_t>(10, 20));
  CHECK(times["reduce_scatter root"] == std::pair<int64_t, int64_t>(20, 30));
  CHECK(times["reduce_scatter layer4"] == std::pair<int64_t, int64_t>(30, 40));  // behind it, in its queue
}

TEST_CASE("a failed backward leaves no reduction that waits", "[runtime][reduce_scatter_start]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain(5);
    for (const auto start : {Start::kFirstAfterAllGather, Start::kFirstAfterNextBackward}) {
      Five five(rank, start);
      for (int step = 0; step < 2; ++step) five.backward();
      auto& weight = five.chain.model->layers[4]->weight;
      const auto hook = weight.register_hook([](const at::Tensor&) -> void { throw std::runtime_error("on all ranks"); });
      rank.check_throws<std::runtime_error>([&] { five.chain.loss(rank.index(), 2).backward(); }, {"on all ranks"}, "hook");
      weight.remove_hook(hook);
      five.chain.root[0].reset_iter_state();
      five.chain.loss(rank.index(), 3).backward();
      check_gradients(rank, *five.chain.model, averaged_gradients(plain, 2, 3), "after the failure");
    }
  });
}

TEST_CASE("the start is the root's", "[runtime][reduce_scatter_start]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    rank.check_throws<StateError>([&] { chain.layers[0].set_reduce_scatter_start(Start::kBySize); },
                                  {"set_reduce_scatter_start", "layer0", "root"}, "not a root");
    rank.check_throws<StateError>([&] { chain.layers[0].choose_reduce_scatter_start([] { return 1.0; }); },
                                  {"choose_reduce_scatter_start", "layer0", "root"}, "not a root");
  });
}

// --- Choosing

/// Times of the steps of a chain: `by_start[i]` for the i-th choice, after two that tell nothing.
struct GivenTimes {
  double operator()() {
    five->backward();
    const size_t step = steps++;
    return step < 2 ? 0.0 : by_start[(step - 2) % by_start.size()];
  }
  Five* five;
  std::vector<double> by_start;
  size_t steps = 0;
};

/// What the launches of a backward say of the start: where the first reduction is.
Calls first_calls(Five& five) {
  auto calls = five.backward();
  calls.resize(6);
  return calls;
}

TEST_CASE("the start is chosen that takes least for the rank that is slowest with it", "[runtime][reduce_scatter_start]") {
  for (size_t best = 0; best < kStarts.size(); ++best)
    on_ranks(4, [&](Rank& rank) {
      Five five(rank);
      // Each rank alone would choose another one.
      std::vector<double> times(kStarts.size(), 5.0);
      times[(best + 1 + static_cast<size_t>(rank.index()) % 2) % 3] = 1.0;
      times[best] = 4.0;
      set_apart(five.chain.root[0], Start::kBySize);
      GivenTimes given{&five, times};
      const auto chosen = five.chain.root[0].choose_reduce_scatter_start(std::ref(given), 2);
      rank.check(chosen == kStarts[best], fmt::format("{} instead of {}", name_of(chosen), name_of(kStarts[best])));
      rank.check_equal(given.steps, size_t{8}, "steps");
      Five expected(rank, kStarts[best]);
      for (int step = 0; step < 3; ++step) expected.backward();
      rank.check_equal(first_calls(five), first_calls(expected), "and set");
    });
}

TEST_CASE("medians count, of numbers", "[runtime][reduce_scatter_start]") {
  on_ranks(2, [](Rank& rank) {
    Five five(rank, Start::kBySize);
    const double nan = std::numeric_limits<double>::quiet_NaN();
    // By round: one that is fast once, one that never is a number, and one that is slow once.
    GivenTimes given{&five, {1, nan, 3, /**/ 5, nan, 3, /**/ 5, nan, 9}};
    rank.check(five.chain.root[0].choose_reduce_scatter_start(std::ref(given), 3) == Start::kFirstAfterNextBackward, "3");
  });
}

TEST_CASE("ranks of a mesh of two dimensions choose the same", "[runtime][reduce_scatter_start]") {
  on_ranks(4, [](Rank& rank) {
    auto chain = ShardedChain(rank.hybrid(2, 2), 3);
    set_apart(chain.root[0], Start::kBySize);
    int steps = 0;
    // Slow with all but the last choice on one rank alone.
    const auto time = [&] {
      chain.step(rank.index(), steps);
      return ++steps == 2 + 3 || rank.index() != 2 ? 1.0 : 2.0;
    };
    rank.check(chain.root[0].choose_reduce_scatter_start(time, 1) == Start::kFirstAfterNextBackward, "the last");
  });
}

TEST_CASE("where there is nothing to choose no step runs", "[runtime][reduce_scatter_start]") {
  const auto none = []() -> double { throw std::logic_error("a step"); };
  on_ranks(1, [&](Rank& rank) {
    ShardedChain chain(rank.mesh());
    set_apart(chain.root[0], Start::kFirstAfterNextBackward);
    rank.check(chain.root[0].choose_reduce_scatter_start(none) == Start::kFirstAfterNextBackward, "the one that is set");
  });
  on_ranks(2, [&](Rank& rank) {
    ShardedChain chain(rank.mesh());
    rank.check_throws<StateError>([&] { chain.root[0].choose_reduce_scatter_start(none); },
                                  {"set_separate_reduce_scatter_group first"}, "one communicator");
    chain.root[0].set_separate_reduce_scatter_group();
    chain.model->after_layer = [&](int) {
      rank.check_throws<StateError>([&] { chain.root[0].choose_reduce_scatter_start(none); }, {"between steps"}, "inside");
    };
    chain.step(rank.index());
  });
}

TEST_CASE("what goes wrong while a start is chosen leaves the one before", "[runtime][reduce_scatter_start]") {
  on_ranks(2, [](Rank& rank) {
    for (const auto start : kStarts) {
      Five five(rank, start);
      const auto expected = five.learned_backward();
      auto& root = five.chain.root[0];
      rank.check_throws<UsageError>([&] { root.choose_reduce_scatter_start({}); }, {"expected a function"}, "none");
      rank.check_throws<UsageError>([&] { root.choose_reduce_scatter_start([] { return 1.0; }, 0); },
                                    {"expected 1 round or more, found 0"}, "no round");
      rank.check_throws<UsageError>([&] { root.choose_reduce_scatter_start([] { return std::nan(""); }, 1); },
                                    {"no finite time"}, "no numbers");
      int steps = 0;
      rank.check_throws<std::runtime_error>(
          [&] {
            root.choose_reduce_scatter_start([&]() -> double {
              if (++steps == 4) throw std::runtime_error("enough");
              return 1.0;
            });
          },
          {"enough"}, "thrown");
      rank.check_equal(five.backward(), expected, name_of(start));
    }
  });
}

}  // namespace
}  // namespace fsdp::test
