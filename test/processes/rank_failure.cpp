// Trains on the ranks that the launcher started until rank 1 throws; every rank then says in one
// line why it ended, where torchrun reads it or else on standard error. Run by test_failures.py.
#include <fsdp/fsdp.hpp>

#include <torch/nn.h>
#include <torch/optim.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#include "llama/error_file.hpp"

namespace fsdp::test::rank_failure {
namespace {

void train_until_rank_1_throws(const std::shared_ptr<Communicator>& world) {
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"shard"});
  torch::nn::Sequential model(torch::nn::Linear(6, 6), torch::nn::Linear(6, 6));
  for (auto& layer : *model) fsdp::fully_shard(*layer.ptr(), {.mesh = mesh});
  fsdp::fully_shard(model, {.mesh = mesh});
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  for (int step = 0; step < 1000; ++step) {
    const auto loss = model->forward(torch::ones({2, 6})).square().sum();
    if (world->rank() == 1 && step == 3) throw std::runtime_error("rank 1 gives up on purpose");
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
  }
}

}  // namespace

int run(int, char**) {
  const auto timeout = std::chrono::milliseconds(std::atoi(std::getenv("FSDP_TEST_TIMEOUT_MS")));
  const auto world = fsdp::init_process_group({.timeout = timeout});  // until this rank has said why it ends
  try {
    train_until_rank_1_throws(world);
  } catch (const std::exception& error) {
    if (!llama::write_error_file(error.what())) std::fprintf(stderr, "failed: %s\n", error.what());
    return 1;
  }
  return 0;
}

}  // namespace fsdp::test::rank_failure
