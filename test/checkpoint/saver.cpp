// Saves the checkpoints FOLDER/c again and again on two ranks, with values that tell which save they are from, until it
// is killed or has saved COUNT: for the test that kills it, and for Python to read. After each save, and before the
// first, it prints a line.
#include <ATen/Parallel.h>
#include <fsdp/fsdp.hpp>
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(300, 700));
    second = register_module("second", torch::nn::Linear(700, 301));
    table = register_buffer("table", torch::arange(7));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  at::Tensor table;
};
TORCH_MODULE(Net);

void run(const std::shared_ptr<fsdp::Communicator>& world, const std::string& folder, int begin, int count) {
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"shard"});
  Net net;
  torch::NoGradGuard no_grad;
  fsdp::fully_shard(net->first, {.mesh = mesh});
  fsdp::fully_shard(net, {.mesh = mesh, .shard_placement_fn = [](const std::string&, const at::Tensor& parameter) {
                            return fsdp::Shard{parameter.dim() - 1};
                          }});
  torch::optim::AdamW optimizer(net->parameters());
  for (int save = begin; save < begin + count; ++save) {
    for (auto& parameter : net->parameters()) parameter.fill_(save);
    if (world->rank() == 0) {
      std::puts("next");
      std::fflush(stdout);
    }
    fsdp::save_checkpoint(folder + "/c", {net, optimizer, std::to_string(save)},
                          {.world = world, .max_file_bytes = 1'000'000});
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fputs("usage: fsdp_checkpoint_saver FOLDER FIRST COUNT\n", stderr);
    return 2;
  }
  at::set_num_threads(1);
  fsdp::run_ranks(2, [&](const std::shared_ptr<fsdp::Communicator>& world) { run(world, argv[1], std::atoi(argv[2]), std::atoi(argv[3])); });
  return 0;
}
