// Modules whose parts compute on several streams: what is gathered is waited for where it is used, and gradients where they
// were accumulated.
#include <catch2/catch.hpp>

#include <optional>
#include <span>
#include <thread>

#include "late_capture.hpp"
#include "late_training.hpp"
#include "stream_calls.hpp"
#include "support/sample.hpp"

namespace fsdp::test {
namespace {

using namespace std::chrono_literals;

/// Two linear modules side by side, each on a stream of its own where there is a second one. One group.
struct TwoBranchesImpl : torch::nn::Module {
  explicit TwoBranchesImpl(int64_t width)
      : left(register_module("left", torch::nn::Linear(width, width))),
        right(register_module("right", torch::nn::Linear(width, width))) {}

  at::Tensor forward(const at::Tensor& x, const std::optional<c10::Stream>& side) {
    if (!side) return torch::tanh(left(x) + right(x));
    const auto here = guard_of_late().getStream(side->device());
    let_wait(*side, here);
    auto l = is_right_first ? at::Tensor() : left(x);
    at::Tensor r;
    {
      const c10::StreamGuard there(*side);
      r = right(x);
    }
    if (is_right_first) l = left(x);
    let_wait(here, *side);
    guard_of_late().recordDataPtrOnStream(r.storage().data_ptr(), here);
    guard_of_late().recordDataPtrOnStream(x.storage().data_ptr(), *side);
    return torch::tanh(l + r);
  }

  torch::nn::Linear left, right;
  bool is_right_first = false;
};
TORCH_MODULE(TwoBranches);

struct BranchesImpl : torch::nn::Module {
  explicit BranchesImpl(int count, int64_t width) {
    for (int i = 0; i < count; ++i) layers.push_back(register_module(fmt::format("layer{}", i), TwoBranches(width)));
    head = register_module("head", torch::nn::Linear(width, 2));
  }
  at::Tensor forward(at::Tensor x, const std::optional<c10::Stream>& side) {
    for (auto& layer : layers) x = layer->forward(x, side);
    return head(x);
  }
  std::vector<TwoBranches> layers;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Branches);

struct Branching {
  int64_t width = kNarrow;
  int steps = 4;
  int micro_batches = 1;
  FullyShardOptions options = {};
  std::vector<int64_t> mesh = {};
  bool gathers_ahead = false;   ///< all groups, before any branch
  bool is_right_first = false;  ///< the side stream is the first to use a layer's parameters
  bool syncs_at_last = false;   ///< gradients wait on the unsharded parameters until the last micro-batch
  bool is_captured = false;     ///< one step behind the second, which is replayed then; of one micro-batch
  int input_buffers = 1;
};

Branches branches(const Branching& branching) {
  auto model = seeded(7, [&] { return Branches(3, branching.width); });
  for (auto& layer : model->layers) layer->is_right_first = branching.is_right_first;
  return model;
}

at::Tensor branch_input(const Branching& branching, int rank, int step, int micro) {
  return Inputs(rank, step, micro).normal({4, branching.width});
}

/// Parameters of the unsharded model, and the gradients of its last step.
std::pair<NamedTensors, NamedTensors> train_plain_branches(const Branching& branching, int ranks) {
  auto model = branches(branching);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int step = 0; step < branching.steps; ++step) {
    optimizer.zero_grad();
    for (int micro = 0; micro < branching.micro_batches; ++micro)
      for (int rank = 0; rank < ranks; ++rank)
        (model->forward(branch_input(branching, rank, step, micro), {}).square().mean() / ranks).backward();
    optimizer.step();
  }
  NamedTensors parameters, gradients;
  for (const auto& [name, parameter] : unique_parameters(*model)) {
    parameters.emplace_back(name, parameter.detach());
    gradients.emplace_back(name, parameter.grad());
  }
  return {parameters, gradients};
}

void train(LateRank& rank, const Branching& branching, const std::pair<NamedTensors, NamedTensors>& plain) {
  auto model = branches(branching);
  auto options = branching.options;
  options.mesh = branching.mesh.size() == 2
                     ? init_device_mesh(rank.world, branching.mesh, {"replicate", "shard"})
                     : init_device_mesh(rank.world, {rank.size()}, {"shard"});
  std::vector<FSDPModule> layers;
  for (auto& layer : model->layers) layers.push_back(fully_shard(layer, options));
  auto root = fully_shard(model, options);
  root.set_reduce_scatter_max_input_buffers(branching.input_buffers);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  const auto side = new_stream(rank.index()), made_on = current_stream_of(rank.index());
  const c10::StreamGuard on(branching.is_captured ? new_stream(rank.index()) : made_on);
  let_wait(current_stream_of(rank.index()), made_on);
  std::vector<at::Tensor> inputs;
  for (int step = 0; step < branching.steps; ++step)
    for (int micro = 0; micro < branching.micro_batches; ++micro)
      inputs.push_back(branch_input(branching, rank.index(), step, micro).to(rank.device()));
  const auto train_step = [&](std::span<const at::Tensor> micro_batches) {
    optimizer.zero_grad();
    for (const auto& input : micro_batches) {
      if (branching.gathers_ahead)
        for (auto& layer : layers) layer.unshard();
      if (branching.syncs_at_last) root.set_requires_gradient_sync(&input == &micro_batches.back());
      model->forward(input, side).square().mean().backward();
    }
    optimizer.step();
  };
  LateGraph graph;
  const auto captured = at::zeros_like(inputs[0]);
  for (int step = 0; step < branching.steps; ++step) {
    const auto count = static_cast<size_t>(branching.micro_batches);
    const auto micro_batches = std::span(inputs).subspan(static_cast<size_t>(step) * count, count);
    if (!branching.is_captured || step < 2) {
      train_step(micro_batches);
      continue;
    }
    if (step == 2) {
      guard_of_late().synchronizeDevice(static_cast<c10::DeviceIndex>(rank.index()));
      graph.capture([&] { train_step({&captured, 1}); });
    }
    captured.copy_(micro_batches[0]);
    graph.replay();
  }
  const auto parameters = unique_parameters(*model);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, parameter] = parameters[i];
    expect_close(to_local(parameter.grad()).cpu().flatten(), local_elements(parameter, plain.second[i].second), 1e-5,
                 "the last gradient of " + name);
    expect_close(to_local(parameter.detach()).cpu().flatten(), local_elements(parameter, plain.first[i].second), 1e-5,
                 name);
  }
}

void check(const Branching& branching, int ranks = 2) {
  const auto plain = train_plain_branches(branching, ranks);
  Sample sample(3);
  for (const uint64_t seed : {1, 2, 3, 4, 5, 6}) {
    if (!sample.takes_next()) continue;
    INFO("seed " << seed);
    auto errors = errors_on_late({.world_size = ranks, .streams = {.seed = seed, .max_delay = 400us, .has_own_paces = true}},
                                 [&](LateRank& rank) { train(rank, branching, plain); });
    std::erase(errors, "");
    CHECK(errors == std::vector<std::string>{});
  }
}

const FullyShardOptions kKept = {.reshard_after_forward = false};

}  // namespace

TEST_CASE("gradients that were accumulated on several streams are reduced", "[late][branches]") {
  for (const int64_t width : {kNarrow, kWide}) {
    INFO(width << " wide");
    check({.width = width, .options = kKept, .gathers_ahead = true});
    check({.width = width, .options = kKept, .gathers_ahead = true, .is_right_first = true});
  }
}

TEST_CASE("so are those that wait for the last of several backwards, and those of replicas", "[late][branches]") {
  Branching branching{.steps = 3, .micro_batches = 2, .options = kKept, .gathers_ahead = true, .syncs_at_last = true};
  check(branching);
  branching.options.mp_policy.reduce_dtype = at::kDouble;
  check(branching);
  branching = {.options = kKept, .mesh = {2, 2}, .gathers_ahead = true, .input_buffers = 2};
  check(branching, 4);
}

TEST_CASE("steps of several streams are captured as those of one", "[late][branches]") {
  for (const bool gathers_ahead : {false, true})
    for (const auto& options : {FullyShardOptions{}, kKept})
      check({.options = options, .gathers_ahead = gathers_ahead, .is_captured = true});
}

TEST_CASE("parameters that are gathered when one stream uses them are there for another", "[late][branches]") {
  for (const int64_t width : {kNarrow, kWide}) {
    INFO(width << " wide");
    check({.width = width});
    check({.width = width, .is_right_first = true});
  }
}

TEST_CASE("memory that one stream has allocated for what arrived goes back behind another's use of it", "[late][branches]") {
  const LateTraining training;
  CHECK(errors_on_late({.world_size = 2}, [&](LateRank& rank) {
          auto chain = sharded_chain(rank, training);
          const torch::NoGradGuard no_grad;
          const auto x = at::ones({kBatch, training.width}, at::TensorOptions(rank.device()));
          const auto& weight = chain.model->layers[0]->weight;
          const auto here = current_stream_of(rank.index()), other = new_stream(rank.index());
          {
            const c10::StreamGuard launched_on(new_stream(rank.index()));
            static_cast<void>(chain.layers[0].unshard_async());
          }
          const auto expected = at::linear(x, weight);
          at::Tensor seen;
          std::optional<Stall> stall;
          {
            const c10::StreamGuard there(other);
            let_wait(other, here);
            stall.emplace(rank.index());
            seen = at::linear(x, weight);
          }
          chain.layers[0].reshard();
          const auto next = at::empty({1}, x.options());
          std::this_thread::sleep_for(20ms);  // by then whoever waits for nobody has written there
          stall->end();
          expect_close(seen.cpu(), expected.cpu(), 0, "what another stream computes");
        }) == std::vector<std::string>{"", ""});
}

}  // namespace fsdp::test
