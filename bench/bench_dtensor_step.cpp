#include <torch/torch.h>

#include <functional>
#include <map>

#include "bench_worker.hpp"
#include "callgrind_requests.hpp"
#include "fsdp/fsdp.hpp"

// What LibTorch's own optimizers and clipping cost on DTensors, beside ordinary tensors of the same sizes: parameters of 16x16
// float32 at one rank, where a piece is the whole and nothing is communicated.
namespace fsdp::bench {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

struct Parameters {
  Tensors parameters, gradients, averages, squares, steps;

  Parameters(int64_t count, bool is_sharded) {
    const auto world = simulated_network({.world_size = 1, .latency_us = 0, .bandwidth_gb_per_s = 0});
    const auto mesh = init_device_mesh(world, {1}, {"shard"});
    const torch::NoGradGuard no_grad;
    for (int64_t i = 0; i < count; ++i) {
      const auto whole = torch::ones({16, 16});
      parameters.push_back(is_sharded ? Tensor(distribute_tensor(whole, mesh, {Shard{0}})) : whole);
      // As optimizers and backward make them.
      gradients.push_back(at::full_like(parameters.back(), 0.01));
      averages.push_back(at::zeros_like(parameters.back()));
      squares.push_back(at::ones_like(parameters.back()));
      parameters.back().set_requires_grad(true);
      steps.push_back(torch::ones({}));
      parameters.back().mutable_grad() = gradients.back();
    }
  }
};

template <class Optimizer, class Options>
std::function<void()> step_of(Parameters& all, Options options) {
  return [optimizer = std::make_shared<Optimizer>(all.parameters, options)] { optimizer->step(); };
}

std::function<void()> foreach_step(Parameters& all) {
  return [&all] {
    const torch::NoGradGuard no_grad;
    at::_foreach_mul_(all.parameters, 0.999);
    at::_foreach_lerp_(all.averages, all.gradients, 0.1);
    at::_foreach_mul_(all.squares, 0.99);
    at::_foreach_addcmul_(all.squares, all.gradients, all.gradients, 0.01);
    auto roots = at::_foreach_sqrt(all.squares);
    at::_foreach_add_(roots, 1e-8);
    at::_foreach_addcdiv_(all.parameters, all.averages, roots, -0.01);
  };
}

std::function<void()> fused_step(Parameters& all) {
  return [&all] {
    const torch::NoGradGuard no_grad;
    at::_fused_adamw_(all.parameters, all.gradients, all.averages, all.squares, {}, all.steps, 0.01, 0.9, 0.99, 0.01, 1e-8,
                      /*amsgrad=*/false, /*maximize=*/false);
  };
}

std::function<void()> step_named(const std::string& name, Parameters& all) {
  using namespace torch::optim;
  if (name == "AdamW") return step_of<AdamW>(all, AdamWOptions(0.01));
  if (name == "Adam") return step_of<Adam>(all, AdamOptions(0.01));
  if (name == "SGD") return step_of<SGD>(all, SGDOptions(0.01).momentum(0.9));
  if (name == "foreach_adamw") return foreach_step(all);
  if (name == "fused_adamw") return fused_step(all);
  if (name == "clip_grad_norm_") return [&all] { torch::nn::utils::clip_grad_norm_(all.parameters, 1.0); };
  throw std::invalid_argument("there is no step '" + name + "'");
}

nlohmann::json count_steps(const nlohmann::json& request) {
  Parameters all(request.at("parameters"), request.at("sharded"));
  const auto step = step_named(request.at("step"), all);
  const int steps = request.at("steps");
  for (int i = 0; i < 3; ++i) step();
  start_counting_instructions();
  for (int i = 0; i < steps; ++i) step();
  stop_counting_instructions(request.at("label").get<std::string>().c_str());
  return nlohmann::json::object();
}

}  // namespace

void serve_dtensor_step() {
  at::set_num_threads(1);
  serve(count_steps);
}

}  // namespace fsdp::bench
