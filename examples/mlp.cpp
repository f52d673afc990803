// A module of one's own: sharded block by block, trained in bfloat16 with float32 shards, and looked at.
//
//   torchrun --nproc-per-node 2 --no-python build/examples/mlp
#include <cstdio>
#include <fsdp/fsdp.hpp>
#include <torch/torch.h>

namespace {

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x + down->forward(torch::gelu(up->forward(norm->forward(x)))); }
  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl(int64_t width, int count)
      : blocks(register_module("blocks", torch::nn::ModuleList())), head(register_module("head", torch::nn::Linear(width, 1))) {
    for (int i = 0; i < count; ++i) blocks->push_back(Block(width));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& block : *blocks) x = block->as<BlockImpl>()->forward(x);
    return head->forward(x);
  }
  torch::nn::ModuleList blocks;
  torch::nn::Linear head;
};
TORCH_MODULE(Net);

}  // namespace

int main() {
  const auto world = fsdp::init_process_group();
  const auto mesh = fsdp::init_device_mesh(world, {world->size()}, {"shard"});
  torch::manual_seed(1);
  Net net(/*width=*/64, /*count=*/4);
  net->to(mesh.device());

  const fsdp::FullyShardOptions options{.mesh = mesh,
                                        .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}};
  for (auto& block : *net->blocks) fsdp::fully_shard(*block, options);
  auto root = fsdp::fully_shard(net, options);

  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  torch::manual_seed(2 + world->rank());
  double first = 0, last = 0;
  for (int step = 0; step < 30; ++step) {
    const auto x = torch::randn({32, 64}, mesh.device());
    const auto loss = torch::mse_loss(net->forward(x).to(torch::kFloat), x.mean(1, true));
    optimizer.zero_grad();
    loss.backward();
    torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  if (world->rank() == 0) std::printf("%s\n", root.report().to_string().c_str());
  std::printf("rank %d: loss %.4f -> %.4f\n", world->rank(), first, last);
  return last < first ? 0 : 1;
}
