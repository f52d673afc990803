// A program as a user of libfsdp writes it: public headers and LibTorch alone. It trains a sharded
// LSTM on one rank and on two that are threads, and compares with the plain model.
#include <fsdp/fsdp.hpp>

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int kSteps = 5, kRows = 4, kTokens = 6, kFeatures = 5, kHidden = 7;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    lstm = register_module(
        "lstm", torch::nn::LSTM(torch::nn::LSTMOptions(kFeatures, kHidden).batch_first(true)));
    head = register_module("head", torch::nn::Linear(kHidden, 3));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return head->forward(std::get<0>(lstm->forward(x)));
  }
  torch::nn::LSTM lstm = nullptr;
  torch::nn::Linear head = nullptr;
};
TORCH_MODULE(Net);

struct Problem {
  std::vector<torch::Tensor> weights;  // that training starts from
  torch::Tensor inputs, targets;
};

struct Outcome {
  std::vector<double> losses;
  std::vector<torch::Tensor> weights;
};

void set_weights(Net& net, const std::vector<torch::Tensor>& weights) {
  torch::NoGradGuard no_grad;
  const auto parameters = net->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(weights[i]);
}

std::vector<torch::Tensor> copy_weights(const Net& net) {
  std::vector<torch::Tensor> weights;
  for (const auto& parameter : net->parameters()) weights.push_back(parameter.detach().clone());
  return weights;
}

std::vector<double> train(Net& net, const torch::Tensor& inputs, const torch::Tensor& targets) {
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    const auto loss = torch::mse_loss(net->forward(inputs), targets);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

Outcome train_plain(const Problem& problem) {
  Net net;
  set_weights(net, problem.weights);
  auto losses = train(net, problem.inputs, problem.targets);
  return {losses, copy_weights(net)};
}

/// Trains on this rank's rows. The losses are this rank's, the weights the whole model's.
Outcome train_sharded(const Problem& problem, const std::shared_ptr<fsdp::Communicator>& world) {
  Net net;
  set_weights(net, problem.weights);
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"shard"});
  fsdp::fully_shard(net->lstm, {.mesh = mesh});
  fsdp::fully_shard(net, {.mesh = mesh});
  const auto rows = kRows / world->size();
  auto losses = train(net, problem.inputs.narrow(0, world->rank() * rows, rows),
                      problem.targets.narrow(0, world->rank() * rows, rows));
  Outcome outcome{losses, {}};
  for (const auto& parameter : net->parameters())
    outcome.weights.push_back(fsdp::dtensor_of(parameter).full_tensor().clone());
  return outcome;
}

void check(const std::string& what, const Outcome& sharded, const Outcome& plain) {
  for (int step = 0; step < kSteps; ++step)
    if (std::abs(sharded.losses[step] - plain.losses[step]) > 1e-5 * plain.losses[step])
      throw std::runtime_error(what + ": the loss of step " + std::to_string(step) + " is " +
                               std::to_string(sharded.losses[step]) + ", the plain model's " +
                               std::to_string(plain.losses[step]));
  for (size_t i = 0; i < plain.weights.size(); ++i)
    if (!torch::allclose(sharded.weights[i], plain.weights[i], 1e-4, 1e-5))
      throw std::runtime_error(what + ": weight " + std::to_string(i) + " differs");
  std::printf("%s: the losses and %zu weights equal the plain model's\n", what.c_str(),
              plain.weights.size());
}

}  // namespace

int main() {
  torch::manual_seed(3);
  at::set_num_threads(1);
  const Problem problem{copy_weights(Net()), torch::randn({kRows, kTokens, kFeatures}),
                        torch::randn({kRows, kTokens, 3})};
  try {
    const auto plain = train_plain(problem);
    if (!(plain.losses.back() < plain.losses.front()))
      throw std::runtime_error("the plain model does not learn");
    check("one rank", train_sharded(problem, fsdp::single_rank()), plain);

    std::vector<Outcome> ranks(2);
    fsdp::run_ranks(2, [&](std::shared_ptr<fsdp::Communicator> world) {
      ranks[world->rank()] = train_sharded(problem, world);
    });
    for (int step = 0; step < kSteps; ++step)
      ranks[0].losses[step] = (ranks[0].losses[step] + ranks[1].losses[step]) / 2;
    check("two ranks", ranks[0], plain);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_lstm: %s\n", error.what());
    return 1;
  }
}
