#include <torch/torch.h>

#include <optional>

#include "bench_models.hpp"
#include "bench_worker.hpp"
#include "fsdp/fsdp.hpp"

namespace fsdp::bench {
namespace {

/// A model, sharded over the world or plain, and what it takes to train it.
class Trainer {
 public:
  explicit Trainer(const nlohmann::json& request)
      : model_(MlpSizes{.blocks = request.at("blocks"),
                        .dim = request.at("dim"),
                        .hidden = request.at("hidden"),
                        .vocabulary = request.at("vocabulary")}),
        tokens_(torch::arange(request.at("tokens").get<int64_t>())
                    .remainder(request.at("vocabulary").get<int64_t>())) {
    for (const auto& parameter : model_->parameters()) parameters_ += parameter.numel();
    if (request.at("impl") == "fsdp") {
      const auto world = join_world();
      shard(model_, init_device_mesh(world, {world->size()}, {"shard"}), /*reshard_after_forward=*/!request.at("kept"));
    }
    optimizer_.emplace(model_->parameters(), torch::optim::SGDOptions(1e-3));
  }

  int64_t parameters() const { return parameters_; }
  double loss() const { return loss_; }

  void step() {
    optimizer_->zero_grad(/*set_to_none=*/true);
    const auto loss = model_->loss(tokens_);
    loss.backward();
    optimizer_->step();
    loss_ = loss.item<double>();
  }

 private:
  MlpModel model_;
  at::Tensor tokens_;
  std::optional<torch::optim::SGD> optimizer_;
  int64_t parameters_ = 0;
  double loss_ = 0;
};

}  // namespace

void serve_gloo_step() {
  at::set_num_threads(1);
  torch::manual_seed(0);
  std::optional<Trainer> trainer;
  serve([&](const nlohmann::json& request) -> nlohmann::json {
    if (request.at("do") == "setup") {
      trainer.emplace(request);
      return {{"parameters", trainer->parameters()}};
    }
    std::vector<double> times;
    for (int i = 0; i < request.at("steps"); ++i)
      times.push_back(seconds([&] { trainer->step(); }));
    return {{"seconds", times}, {"loss", trainer->loss()}};
  });
}

}  // namespace fsdp::bench
