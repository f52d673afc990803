#include "late_training.hpp"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "base/require.hpp"

namespace fsdp::test {
namespace {

constexpr double kRounding = 1e-7;  // of sums whose parts are much larger than what is left

std::unique_ptr<torch::optim::Optimizer> optimizer_of(const LateTraining& training, torch::nn::Module& module) {
  // Where a second moment is next to nothing, Adam makes much of a sum's order.
  if (training.uses_adam)
    return std::make_unique<torch::optim::Adam>(module.parameters(), torch::optim::AdamOptions(kLearningRate).eps(1e-2));
  return std::make_unique<torch::optim::SGD>(module.parameters(), torch::optim::SGDOptions(kLearningRate).momentum(0.9));
}

DeviceMesh mesh_of(const LateRank& rank, const LateTraining& training) {
  if (training.mesh.size() == 2) return init_device_mesh(rank.world, training.mesh, {"replicate", "shard"});
  return init_device_mesh(rank.world, {rank.size()}, {"shard"});
}

}  // namespace

at::Tensor input_of(const LateTraining& training, int rank, int step, int micro_batch) {
  return Inputs(rank, step, micro_batch).normal({kBatch, training.width});
}

ShardedChain sharded_chain(const LateRank& rank, const LateTraining& training) {
  auto options = training.options;
  options.mesh = mesh_of(rank, training);
  ShardedChain chain(seeded(5, [&] { return Chain(training.layers, training.width); }), options);
  if (training.control) training.control(chain);
  return chain;
}

void expect_close(const at::Tensor& actual, const at::Tensor& expected, double relative, const std::string& what) {
  require(actual.sizes() == expected.sizes(), "{}: sizes {} where {} are expected", what,
          fmt::join(actual.sizes(), "x"), fmt::join(expected.sizes(), "x"));
  if (actual.numel() == 0) return;
  const auto difference = (actual.to(at::kFloat) - expected).abs().max().item<double>();
  const auto largest = expected.abs().max().item<double>();
  require(difference <= relative * largest + kRounding, "{}: differs by {} from numbers of up to {}", what, difference,
          largest);
}

PlainTraining train_plain(const LateTraining& training, int ranks) {
  PlainTraining plain;
  auto chain = plain_chain(training.layers, training.width);
  const auto optimizer = optimizer_of(training, *chain);
  for (int step = 0; step < training.steps; ++step) {
    optimizer->zero_grad();
    for (int micro = 0; micro < training.micro_batches; ++micro)
      for (int rank = 0; rank < ranks; ++rank) {
        auto loss = chain->forward(input_of(training, rank, step, micro)).square().mean();
        plain.losses.push_back(loss.detach());
        (loss / ranks).backward();
      }
    optimizer->step();
  }
  for (const auto& [name, parameter] : unique_parameters(*chain)) {
    plain.gradients.emplace_back(name, parameter.grad());
    plain.parameters.emplace_back(name, parameter.detach());
  }
  return plain;
}

void expect_like_plain(const torch::nn::Module& model, const LateTraining& training, const PlainTraining& plain) {
  const auto parameters = unique_parameters(model);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, parameter] = parameters[i];
    expect_close(to_local(parameter.grad()).cpu().flatten(), local_elements(parameter, plain.gradients[i].second),
                 training.relative, "the last gradient of " + name);
    expect_close(to_local(parameter.detach()).cpu().flatten(), local_elements(parameter, plain.parameters[i].second),
                 training.relative, name);
  }
}

void train_late(LateRank& rank, const LateTraining& training, const PlainTraining& plain) {
  c10::OptionalStreamGuard side;
  if (training.runs_on_side_stream)
    side.reset_stream(c10::impl::VirtualGuardImpl(kLate).getNewStream(rank.device()));
  auto chain = sharded_chain(rank, training);
  const auto optimizer = optimizer_of(training, *chain.model);
  std::vector<at::Tensor> inputs, losses;
  for (int step = 0; step < training.steps; ++step)
    for (int micro = 0; micro < training.micro_batches; ++micro)
      inputs.push_back(input_of(training, rank.index(), step, micro).to(rank.device()));
  int waits = 0;
  const int recorded = streams_recorded(rank.index());
  for (int step = 0; step < training.steps; ++step) {
    if (step == 2) waits = host_waits(rank.index());
    optimizer->zero_grad();
    for (int micro = 0; micro < training.micro_batches; ++micro) {
      auto loss = chain.model->forward(inputs[losses.size()]).square().mean();
      losses.push_back(loss.detach());
      if (training.before_backward) training.before_backward(chain, micro);
      loss.backward();
    }
    if (training.after_backward) training.after_backward(chain);
    optimizer->step();
    if (training.after_step) training.after_step(chain);
  }
  waits = host_waits(rank.index()) - waits;
  for (size_t i = 0; i < losses.size(); ++i)
    expect_close(losses[i].cpu(), plain.losses[i * rank.size() + rank.index()], training.relative,
                 fmt::format("loss {}", i));
  expect_like_plain(*chain.model, training, plain);
  // Where one stream computes, memory goes from stream to stream by waits alone.
  require(streams_recorded(rank.index()) == recorded, "the allocator was told of other streams' uses");
  if (!training.waits_in_steps) require(waits == 0, "the host has waited for its device {} times", waits);
}

std::vector<std::string> wrong_on_late(const LateTraining& training, const LateRanksOptions& options) {
  const auto plain = train_plain(training, options.world_size);
  auto errors = errors_on_late(options, [&](LateRank& rank) { train_late(rank, training, plain); });
  std::erase(errors, "");
  return errors;
}

}  // namespace fsdp::test
