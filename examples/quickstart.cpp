#include <cstdio>
#include <fsdp/fsdp.hpp>
#include <torch/torch.h>

int main() {
  auto world = fsdp::init_process_group();  // torchrun's variables; without a launcher: one rank
  torch::manual_seed(1);                    // the same first values on all ranks
  torch::nn::Sequential model(torch::nn::Linear(64, 256), torch::nn::GELU(), torch::nn::Linear(256, 1));
  fsdp::fully_shard(model, fsdp::wrap_class<torch::nn::LinearImpl>());
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  torch::manual_seed(2 + world->rank());  // other data on each rank
  for (int step = 0; step < 20; ++step) {
    auto input = torch::randn({32, 64}), target = input.mean(1, true);
    auto loss = torch::mse_loss(model->forward(input), target);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    std::printf("step %d, rank %d: loss %.4f\n", step, world->rank(), loss.item<double>());
  }
}
