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

/// Of each block, and of the root's own: this rank's.
std::vector<int64_t> local_bytes(MlpModel& model) {
  std::vector<int64_t> bytes;
  int64_t root = parameter_bytes(*model);
  for (const auto& block : *model->blocks) root -= bytes.emplace_back(parameter_bytes(*block));
  bytes.push_back(root);
  return bytes;
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
  return {{"local_bytes", local_bytes(model)},
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
  serve([&](const nlohmann::json& request) { return measure_sharded(world, request); });
}

}  // namespace fsdp::bench
