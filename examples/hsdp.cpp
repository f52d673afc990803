// Shards within a group of two ranks and replicates over the groups: what several nodes do, where the fast network is within
// a node. On real nodes fsdp::hybrid_mesh(world) makes this mesh from the launcher's local world size.
//
//   torchrun --nproc-per-node 4 --no-python build/examples/hsdp
#include <cstdio>
#include <fsdp/fsdp.hpp>
#include <torch/torch.h>

int main() {
  const auto world = fsdp::init_process_group();
  const int64_t shard = world->size() % 2 == 0 ? 2 : 1;
  const auto mesh = fsdp::init_device_mesh(world, {world->size() / shard, shard}, {"replicate", "shard"});
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(32, 128), torch::nn::GELU(), torch::nn::Linear(128, 1));
  auto root = fsdp::fully_shard(model, fsdp::wrap_class<torch::nn::LinearImpl>(), {.mesh = mesh});
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  torch::manual_seed(2 + world->rank());

  double first = 0, last = 0;
  for (int step = 0; step < 10; ++step) {
    optimizer.zero_grad();
    // Two micro-batches a step. The first one's gradients are added up within the shard group, and go over the slow network
    // with the second one's.
    for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
      root.set_requires_all_reduce(micro_batch == 1);
      const auto x = torch::randn({32, 32});
      const auto loss = torch::mse_loss(model->forward(x), x.mean(1, true)) / 2;
      loss.backward();
      last = loss.item<double>();
    }
    if (step == 0) first = last;
    optimizer.step();
  }
  std::printf("rank %d of %s: placements %s, loss %.4f -> %.4f\n", world->rank(), mesh.to_string().c_str(),
              fsdp::to_string(root.placements()).c_str(), first, last);
  return last < first ? 0 : 1;
}
