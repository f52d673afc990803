// Data parallelism without shards, which LibTorch does not have: every rank holds the whole model, and gradients are averaged
// beside backward, group by group.
//
//   torchrun --nproc-per-node 2 --no-python build/examples/ddp
#include <cstdio>
#include <fsdp/fsdp.hpp>
#include <torch/torch.h>

int main() {
  const auto world = fsdp::init_process_group();
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"replicate"});
  // Other first values on each rank; sync_from_rank0 gives all of them the first one's, as DDP does.
  torch::manual_seed(1 + world->rank());
  torch::nn::Sequential model(torch::nn::Linear(32, 128), torch::nn::ReLU(), torch::nn::Linear(128, 1));
  fsdp::fully_shard(model, fsdp::wrap_class<torch::nn::LinearImpl>(),
                    {.mesh = mesh, .replicate_only = true, .sync_from_rank0 = true});
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::manual_seed(100 + world->rank());

  double first = 0, last = 0;
  for (int step = 0; step < 20; ++step) {
    const auto x = torch::randn({32, 32});
    const auto loss = torch::mse_loss(model->forward(x), x.mean(1, true));
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  std::printf("rank %d: loss %.4f -> %.4f\n", world->rank(), first, last);
  return last < first ? 0 : 1;
}
