#pragma once

#include <fsdp/fsdp.hpp>

#include <torch/nn.h>

#include <cstdio>
#include <exception>
#include <string>
#include <vector>

namespace fsdp::test {

/// Three layers of one size and a head, of which ranks that disagree leave one out.
struct RankChainImpl : torch::nn::Module {
  explicit RankChainImpl(int64_t width) {
    for (int i = 0; i < 3; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(width, width)));
    head = register_module("head", torch::nn::Linear(width, 1));
  }
  /// skipped: the index of a layer; -1: none.
  at::Tensor forward(at::Tensor x, int skipped) {
    for (int i = 0; i < 3; ++i)
      if (i != skipped) x = torch::tanh(layers[static_cast<size_t>(i)]->forward(x));
    return head->forward(x);
  }
  std::vector<torch::nn::Linear> layers;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(RankChain);

/// Runs the body, says on the standard output why it failed, and returns the exit code that the tests expect then.
template <class Body>
int end_of_rank(const Body& body) {
  try {
    body();
  } catch (const ScheduleError& error) {
    std::printf("schedule: %s\n", error.what());
    return 3;
  } catch (const std::exception& error) {
    std::printf("failed: %s\n", error.what());
    return 1;
  }
  return 0;
}

}  // namespace fsdp::test
