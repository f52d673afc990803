#include <ATen/Context.h>
#include <torch/torch.h>

#include "bench_worker.hpp"
#include "callgrind_requests.hpp"
#include "fsdp/fsdp.hpp"

// Note [The block of host_overhead]
// A block has P parameters and uses each once, by an operator whose backward reads it again: so
// every parameter is touched twice a step, as a Linear's weight is. `mul` is the cheapest such
// operator, x * w with vectors of `world` elements; it leaves the most precise difference between sharded and plain.
// `linear` is x + linear(x, w) with w of [world, 8]: it adds what views of a weight cost. Dimension
// 0 equals the world size, so each rank owns one row of every parameter and nothing is padded.

namespace fsdp::bench {
namespace {

enum class Operator { kMul, kLinear };

struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t params, int64_t world, Operator use) : use_(use) {
    const std::vector<int64_t> sizes =
        use == Operator::kMul ? std::vector<int64_t>{world} : std::vector<int64_t>{world, 8};
    for (int64_t i = 0; i < params; ++i)
      weights_.push_back(register_parameter("weight" + std::to_string(i), torch::ones(sizes)));
  }

  at::Tensor forward(at::Tensor x) {
    for (const auto& weight : weights_) {
      x = use_ == Operator::kMul ? x * weight
                                 : x + torch::nn::functional::linear(x, weight).narrow(1, 0, 8);
    }
    return x;
  }

 private:
  Operator use_;
  std::vector<at::Tensor> weights_;
};
TORCH_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  ModelImpl(int64_t blocks, int64_t params, int64_t world, Operator use) {
    for (int64_t i = 0; i < blocks; ++i) blocks_->push_back(Block(params, world, use));
    register_module("blocks", blocks_);
  }

  at::Tensor forward(at::Tensor x) {
    for (const auto& block : *blocks_) x = block->as<Block>()->forward(x);
    return x;
  }

  torch::nn::ModuleList blocks_;
};
TORCH_MODULE(Model);

struct Case {
  int64_t blocks, params, world;
  Operator use;
  bool is_sharded;
  int warmup, steps;
  std::string label;

  explicit Case(const nlohmann::json& request)
      : blocks(request.at("blocks")),
        params(request.at("params_per_block")),
        world(request.at("world")),
        use(request.at("operator") == "mul" ? Operator::kMul : Operator::kLinear),
        is_sharded(request.at("sharded")),
        warmup(request.at("warmup")),
        steps(request.at("steps")),
        label(request.at("label")) {}
};

Model make_model(const Case& c) {
  Model model(c.blocks, c.params, c.world, c.use);
  if (!c.is_sharded) return model;
  const auto network = simulated_network({.world_size = static_cast<int>(c.world),
                                          .latency_us = 0,
                                          .bandwidth_gb_per_s = 0,
                                          .moves_own_bytes = false});
  const auto mesh = init_device_mesh(network, {c.world}, {"shard"});
  for (const auto& block : *model->blocks_) fully_shard(*block, {.mesh = mesh});
  fully_shard(model, {.mesh = mesh});
  return model;
}

nlohmann::json answer(const nlohmann::json& request) {
  const Case c(request);
  Model model = make_model(c);
  const auto parameters = model->parameters();
  const auto x = c.use == Operator::kMul ? torch::ones({c.world}) : torch::ones({1, 8});
  const auto step = [&] {
    model->forward(x).sum().backward();
    for (const auto& parameter : parameters) parameter.mutable_grad().reset();
  };

  for (int i = 0; i < c.warmup; ++i) step();
  std::vector<double> times;
  start_counting_instructions();
  for (int i = 0; i < c.steps; ++i) {
    const double begin = cpu_seconds();
    step();
    times.push_back(cpu_seconds() - begin);
  }
  stop_counting_instructions(c.label.c_str());
  return {{"cpu_seconds", times}};
}

}  // namespace

void serve_host_overhead() {
  at::set_num_threads(1);
  // What collectives that move nothing leave in the buffers must cost as much as any other number.
  at::globalContext().setFlushDenormal(true);
  serve(answer);
}

}  // namespace fsdp::bench
