#pragma once

#include <functional>
#include <string>
#include <vector>

#include "support/twin.hpp"

namespace fsdp::test {

/// layer0, layer1, ..., each usually sharded by itself, then a head that the model holds itself.
struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(int count = 3, int64_t width = 6) {
    for (int i = 0; i < count; ++i)
      layers.push_back(register_module(fmt::format("layer{}", i), torch::nn::Linear(width, width)));
    head = register_module("head", torch::nn::Linear(width, 2));
  }
  at::Tensor forward(at::Tensor x) {
    for (size_t i = 0; i < layers.size(); ++i) {
      if (std::find(skipped.begin(), skipped.end(), i) != skipped.end()) continue;
      x = torch::tanh(layers[i]->forward(x));
      if (after_layer) after_layer(static_cast<int>(i));
    }
    return head->forward(x);
  }
  std::vector<torch::nn::Linear> layers;
  torch::nn::Linear head{nullptr};
  std::vector<size_t> skipped;
  std::function<void(int)> after_layer;
};
TORCH_MODULE(Chain);

/// A chain whose layers are groups of their own, on one rank.
struct ShardedChain {
  explicit ShardedChain(const DeviceMesh& mesh, int count = 3, int64_t width = 6, ReshardAfterForward reshard = {})
      : model(seeded(5, [&] { return Chain(count, width); })) {
    for (auto& layer : model->layers)
      layers.push_back(fully_shard(layer, {.mesh = mesh, .reshard_after_forward = reshard}));
    root.push_back(fully_shard(model, {.mesh = mesh}));
  }
  ShardedChain(Chain chain, const FullyShardOptions& options) : model(std::move(chain)) {
    for (auto& layer : model->layers) layers.push_back(fully_shard(layer, options));
    root.push_back(fully_shard(model, options));
  }
  at::Tensor loss(int rank, int step) {
    Inputs inputs(rank, step);
    return model->forward(inputs.normal({4, model->head->options.in_features()})).square().mean();
  }
  /// A forward and a backward, gradients dropped.
  void step(int rank, int step = 0) {
    loss(rank, step).backward();
    model->zero_grad();
  }

  Chain model;
  std::vector<FSDPModule> layers;
  std::vector<FSDPModule> root;  ///< exactly one
};

/// A chain as a workload: layers and root sharded with the options given.
inline Workload chain_workload(int count = 3, int64_t width = 6) {
  Chain chain(count, width);
  return {.module = chain.ptr(),
          .shard =
              [chain](const FullyShardOptions& options) {
                for (auto& layer : chain->layers) fully_shard(layer, options);
                fully_shard(chain, options);
              },
          .loss = [chain, width](Inputs& in) mutable { return chain->forward(in.normal({4, width})).square().mean(); }};
}

/// Chains of four layers, with `control` on their roots.
inline MakeWorkload chain_with(std::function<void(FSDPModule&)> control) {
  return [control] {
    auto workload = chain_workload(4, 5);
    auto module = workload.module;
    workload.shard = [module, control, shard = workload.shard](const FullyShardOptions& options) {
      shard(options);
      auto root = *find_fsdp_module(*module);
      control(root);
    };
    return workload;
  };
}

/// The plain twin of a ShardedChain.
inline Chain plain_chain(int count = 3, int64_t width = 6) {
  return seeded(5, [&] { return Chain(count, width); });
}

/// Gradients averaged over the ranks' batches of one step, by running them on `plain`.
inline NamedTensors averaged_gradients(Chain& plain, int ranks, int step = 0) {
  plain->zero_grad();
  for (int rank = 0; rank < ranks; ++rank) {
    Inputs inputs(rank, step);
    plain->forward(inputs.normal({4, plain->head->options.in_features()})).square().mean().backward();
  }
  NamedTensors gradients;
  for (auto& [name, parameter] : unique_parameters(*plain))
    gradients.emplace_back(name, parameter.grad().defined() ? parameter.grad() / ranks : at::Tensor());
  return gradients;
}

/// The sum of these over several steps.
inline NamedTensors summed_gradients(Chain& plain, int ranks, const std::vector<int>& steps) {
  NamedTensors sum;
  for (const int step : steps) {
    auto more = averaged_gradients(plain, ranks, step);
    for (size_t i = 0; i < sum.size(); ++i) more[i].second = sum[i].second + more[i].second;
    sum = std::move(more);
  }
  return sum;
}

/// Compares the sharded parameters' gradients with this rank's rows of `expected` times `factor`.
inline void check_gradients(const Rank& rank, const torch::nn::Module& module, const NamedTensors& expected,
                            const std::string& what, double factor = 1) {
  auto parameters = unique_parameters(module);
  rank.check_equal(parameters.size(), expected.size(), what + ": number of parameters");
  for (size_t i = 0; i < std::min(parameters.size(), expected.size()); ++i) {
    auto full = expected[i].second;
    rank.check_close(parameters[i].second.grad(),
                     full.defined() ? rows_of(full * factor, rank.index(), rank.size()) : full,
                     fmt::format("{}: gradient of {}", what, parameters[i].first));
  }
}

}  // namespace fsdp::test
