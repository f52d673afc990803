// Training that is stopped and goes on, with any number of ranks.
//
//   torchrun --nproc-per-node 2 --no-python build/examples/checkpoint_resume run 10   # up to step 10
//   torchrun --nproc-per-node 4 --no-python build/examples/checkpoint_resume run 20   # goes on from there
#include <cstdio>
#include <cstdlib>
#include <fsdp/fsdp.hpp>
#include <string>
#include <torch/torch.h>

namespace {

constexpr int64_t kRows = 24;  // of all ranks together

/// The rows of a step, the same whatever the number of ranks.
torch::Tensor batch(int64_t step, const fsdp::Communicator& world) {
  torch::manual_seed(1000 + step);
  return torch::randn({kRows, 16}).chunk(world.size())[world.rank()];
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    std::fprintf(stderr, "usage: checkpoint_resume FOLDER STEPS\n");
    return 2;
  }
  const std::string folder = arguments[1];
  const int64_t steps = std::atoll(arguments[2]);

  const auto world = fsdp::init_process_group();
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(16, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  fsdp::fully_shard(model, fsdp::wrap_class<torch::nn::LinearImpl>());
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));

  int64_t step = 0;
  if (const auto path = fsdp::latest_checkpoint(folder)) {
    const auto loaded = fsdp::load_checkpoint(*path, {model, optimizer});
    step = std::stoll(loaded.extra);
    std::printf("rank %d: goes on from %s\n", world->rank(), path->c_str());
  }
  fsdp::CheckpointSaver saver;  // writes while training goes on
  for (; step < steps; ++step) {
    const auto x = batch(step, *world);
    const auto loss = torch::mse_loss(model->forward(x), x.mean(1, true));
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    if ((step + 1) % 5 == 0 || step + 1 == steps)
      saver.start_save(folder + "/step-" + std::to_string(step + 1), {model, optimizer, std::to_string(step + 1)},
                       {.keep_last = 2});
    // The mean over all ranks, which does not depend on how many there are.
    const auto mean = loss.detach().clone();
    world->start_all_reduce(mean, fsdp::ReduceOp::kSum, "loss")->wait();
    if (world->rank() == 0) std::printf("step %ld: loss %.5f\n", static_cast<long>(step + 1), mean.item<double>() / world->size());
  }
  saver.wait();  // a save that failed throws here
}
