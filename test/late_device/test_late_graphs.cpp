// Whole training steps as graphs of the device: captured once, replayed with the results of steps that are not.
#include <catch2/catch.hpp>

#include <optional>
#include <thread>

#include "fsdp/error.hpp"
#include "late_capture.hpp"
#include "late_training.hpp"
#include "stream_calls.hpp"
#include "support/sample.hpp"

namespace fsdp::test {
namespace {

using namespace std::chrono_literals;

/// Steps that are captured once, behind `warm_up` of them, and replayed.
struct GraphTraining {
  LateTraining training = {};  ///< its inputs, and what is checked
  int warm_up = 3, replays = 3;
  int eager = 1;          ///< behind the replays
  std::function<void(ShardedChain&)> in_step = {}, behind_step = {};  ///< between forward and backward; at the end
};

/// Throws what differs from `plain`, of as many steps.
void train_by_graph(LateRank& rank, const GraphTraining& graphs, const PlainTraining& plain) {
  const auto& training = graphs.training;
  auto chain = sharded_chain(rank, training);
  torch::optim::SGD optimizer(chain.model->parameters(), torch::optim::SGDOptions(kLearningRate).momentum(0.9));
  const auto input = at::zeros({kBatch, training.width}, at::TensorOptions(rank.device()));
  at::Tensor loss;
  const auto step = [&] {
    optimizer.zero_grad();
    loss = chain.model->forward(input).square().mean();
    if (graphs.in_step) graphs.in_step(chain);
    loss.backward();
    loss = loss.detach();
    optimizer.step();
    if (graphs.behind_step) graphs.behind_step(chain);
  };
  int steps = 0;
  const auto next_input = [&] { input.copy_(input_of(training, rank.index(), steps++, 0)); };
  std::optional<LateGraph> graph;
  {
    const auto made_on = current_stream_of(rank.index());
    const c10::StreamGuard warm_up(new_stream(rank.index()));
    let_wait(current_stream_of(rank.index()), made_on);
    for (int i = 0; i < graphs.warm_up; ++i) {
      next_input();
      step();
    }
    guard_of_late().synchronizeDevice(static_cast<c10::DeviceIndex>(rank.index()));
  }
  const c10::StreamGuard on(new_stream(rank.index()));
  graph.emplace();
  graph->capture(step);
  for (int i = 0; i < graphs.replays; ++i) {
    next_input();
    graph->replay();
    expect_close(loss.cpu(), plain.losses[static_cast<size_t>((steps - 1) * rank.size() + rank.index())],
                 training.relative, fmt::format("the loss of step {}", steps));
  }
  for (int i = 0; i < graphs.eager; ++i) {
    next_input();
    step();
  }
  expect_like_plain(*chain.model, training, plain);
}

std::vector<std::string> wrong_by_graph(GraphTraining graphs, const LateRanksOptions& options) {
  graphs.training.steps = graphs.warm_up + graphs.replays + graphs.eager;
  const auto plain = train_plain(graphs.training, options.world_size);
  auto errors = errors_on_late(options, [&](LateRank& rank) { train_by_graph(rank, graphs, plain); });
  std::erase(errors, "");
  return errors;
}

void check_graph(GraphTraining graphs, int world_size = 2) {
  Sample sample(2);
  for (const uint64_t seed : {1, 2, 3, 4}) {
    if (!sample.takes_next()) continue;
    graphs.training.width = seed % 2 == 0 ? kWide : kNarrow;
    INFO("seed " << seed);
    const LateRanksOptions options = {.world_size = world_size,
                                      .streams = {.seed = seed, .max_delay = 200us, .has_own_paces = true}};
    CHECK(wrong_by_graph(graphs, options) == std::vector<std::string>{});
  }
}

/// When autograd's thread has let go of the backward that has failed.
void reset(ShardedChain& chain) {
  const auto end = std::chrono::steady_clock::now() + patience();
  for (;;) try {
      return chain.root[0].reset_iter_state();
    } catch (const StateError&) {
      if (std::chrono::steady_clock::now() > end) throw;
      std::this_thread::yield();
    }
}

}  // namespace

TEST_CASE("a captured step trains as one that is not, also where what is released keeps its memory", "[late][graphs]") {
  check_graph({});
  check_graph({.training = {.control = [](ShardedChain& chain) { chain.root[0].set_keep_unsharded_storage(true); }}});
  check_graph({.training = {.options = {.reshard_after_forward = false}}});
}

TEST_CASE("a gather that is given up in a capture leaves no stream unjoined", "[late][graphs]") {
  const auto give_up = [](ShardedChain& chain) {
    auto handle = chain.layers[0].unshard_async();
    chain.layers[0].reshard();
  };
  check_graph({.in_step = give_up});
  check_graph({.behind_step = give_up});
  // On a stream of the user's, which he has joined before.
  check_graph({.behind_step = [](ShardedChain& chain) {
    const int device = chain.root[0].mesh().device().index();
    const auto side = new_stream(device);
    let_wait(side, current_stream_of(device));
    {
      const c10::StreamGuard there(side);
      auto handle = chain.layers[0].unshard_async();
    }
    let_wait(current_stream_of(device), side);
    chain.layers[0].reshard();
  }});
}

TEST_CASE("what stays gathered from before a capture is used in it, and waits for nothing from there", "[late][graphs]") {
  check_graph({.training = {.control = [](ShardedChain& chain) {
    chain.root[0].set_reshard_after_backward(false);
    chain.root[0].set_keep_unsharded_storage(true);
  }}});
  const LateTraining training;
  CHECK(errors_on_late({.world_size = 2}, [&](LateRank& rank) {
          auto chain = sharded_chain(rank, training);
          chain.root[0].set_reshard_after_backward(false);
          const auto x = at::ones({kBatch, training.width}, at::TensorOptions(rank.device()));
          const auto before = chain.model->forward(x);
          before.square().mean().backward();
          guard_of_late().synchronizeDevice(static_cast<c10::DeviceIndex>(rank.index()));
          const c10::StreamGuard on(new_stream(rank.index()));
          const torch::NoGradGuard no_grad;
          at::Tensor output;
          LateGraph graph;
          graph.capture([&] { output = chain.model->forward(x); });
          graph.replay();
          expect_close(output.cpu(), before.detach().cpu(), training.relative, "what the graph computes");
        }) == std::vector<std::string>{"", ""});
}

TEST_CASE("a backward that throws in a capture leaves no stream unjoined once the step is reset", "[late][graphs]") {
  // Gradients are dropped, so there is nothing more to look at.
  for (const bool is_of_replicas : {false, true}) {
    LateTraining training{.mesh = is_of_replicas ? std::vector<int64_t>{2, 2} : std::vector<int64_t>{}};
    auto errors = errors_on_late({.world_size = is_of_replicas ? 4 : 2}, [&](LateRank& rank) {
      auto chain = sharded_chain(rank, training);
      for (auto& layer : chain.layers) layer.set_requires_all_reduce(!is_of_replicas);
      const auto made_on = current_stream_of(rank.index());
      const c10::StreamGuard on(new_stream(rank.index()));
      let_wait(current_stream_of(rank.index()), made_on);
      const auto x = at::ones({kBatch, training.width}, at::TensorOptions(rank.device())).requires_grad_();
      const auto forward = [&] { return chain.model->forward(x).square().mean(); };
      for (int step = 0; step < 2; ++step) forward().backward();
      x.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("stopped"); });
      guard_of_late().synchronizeDevice(static_cast<c10::DeviceIndex>(rank.index()));
      LateGraph graph;
      graph.capture([&] {
        try {
          forward().backward();
        } catch (const std::exception&) {
        }
        reset(chain);
      });
      graph.replay();
      guard_of_late().synchronizeDevice(static_cast<c10::DeviceIndex>(rank.index()));
    });
    std::erase(errors, "");
    CHECK(errors == std::vector<std::string>{});
  }
}

TEST_CASE("a captured step of replicas trains, too, and one with reductions on a communicator of their own", "[late][graphs]") {
  check_graph({.training = {.mesh = {2, 2}}}, 4);
  check_graph({.training = {.layers = 6, .control = [](ShardedChain& chain) {
                              chain.root[0].set_prefetch_distance(2);
                              chain.root[0].set_reduce_scatter_max_input_buffers(2);
                              chain.root[0].set_separate_reduce_scatter_group();
                            }}});
  check_graph({.training = {.control = [](ShardedChain& chain) {
    for (auto& layer : chain.layers) layer.set_symm_mem_for_comm();
    chain.root[0].set_symm_mem_for_comm();
  }}});
}

}  // namespace fsdp::test
