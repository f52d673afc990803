#include <torch/torch.h>

#include "bench_models.hpp"
#include "bench_worker.hpp"
#include "fsdp/fsdp.hpp"
#include "support/counting_allocator.hpp"

namespace fsdp::bench {
namespace {

using namespace fsdp::test;

MlpModel make_model(const nlohmann::json& request) {
  torch::manual_seed(0);
  return MlpModel(MlpSizes{.blocks = request.at("blocks"),
                           .dim = request.at("dim"),
                           .hidden = request.at("hidden"),
                           .vocabulary = request.at("vocabulary")});
}

at::Tensor make_tokens(const nlohmann::json& request) {
  return torch::arange(request.at("tokens").get<int64_t>())
      .remainder(request.at("vocabulary").get<int64_t>());
}

void step(MlpModel& model, const at::Tensor& tokens) { model->loss(tokens).backward(); }

/// What the model is made of, and its activations and temporaries: the peak of a step without
/// parameters and gradients.
nlohmann::json measure_plain(const nlohmann::json& request) {
  MlpModel model = make_model(request);
  const auto tokens = make_tokens(request);
  const int64_t model_bytes = parameter_bytes(*model);
  const int64_t block_bytes = parameter_bytes(*model->blocks[0]);
  const int64_t at_start = live_bytes();
  start_recording();
  step(model, tokens);
  std::vector<uintptr_t> gradients;
  for (const auto& parameter : model->parameters())
    gradients.push_back(reinterpret_cast<uintptr_t>(parameter.grad().data_ptr()));
  return {{"parameter_bytes", model_bytes},
          {"block_bytes", block_bytes},
          {"root_bytes", model_bytes - static_cast<int64_t>(model->blocks->size()) * block_bytes},
          {"activation_bytes",
           peak_without(recorded_events(), gradients, at_start) - model_bytes}};
}

/// What was live at the last peak, largest first: {"bytes": ..., "count": ...}.
nlohmann::json largest_at_peak() {
  auto largest = nlohmann::json::array();
  const auto sizes = sizes_at_peak();
  for (auto size = sizes.rbegin(); size != sizes.rend() && largest.size() < 12; ++size)
    largest.push_back({{"bytes", size->first}, {"count", size->second}});
  return largest;
}

/// The peaks of the steps after the warm-up, gradients dropped before each.
nlohmann::json measure_sharded(const std::shared_ptr<Communicator>& world,
                               const nlohmann::json& request) {
  MlpModel model = make_model(request);
  const auto tokens = make_tokens(request);
  auto root = shard(model, init_device_mesh(world, {world->size()}, {"shard"}));
  root.set_prefetch_distance(request.at("prefetch"));
  const int warmup = request.at("warmup");
  const int repeats = request.at("repeats");
  int64_t between_steps = 0;
  nlohmann::json largest_between_steps;
  std::vector<int64_t> peaks;
  for (int i = 0; i < warmup + repeats; ++i) {
    model->zero_grad(/*set_to_none=*/true);
    between_steps = live_bytes();
    start_recording();
    largest_between_steps = largest_at_peak();
    step(model, tokens);
    if (i >= warmup) peaks.push_back(peak_bytes());
  }
  return {{"local_bytes", parameter_bytes(*model)},
          {"between_steps_bytes", between_steps},
          {"peak_bytes", peaks},
          {"largest_at_peak", largest_at_peak()},
          {"largest_between_steps", largest_between_steps}};
}

}  // namespace

void serve_memory() {
  install_counting_allocator();
  at::set_num_threads(1);
  const auto world = join_world();
  serve([&](const nlohmann::json& request) {
    return request.at("do") == "plain" ? measure_plain(request) : measure_sharded(world, request);
  });
}

}  // namespace fsdp::bench
