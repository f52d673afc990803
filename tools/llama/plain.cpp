#include <algorithm>
#include <cmath>

#include "execution.hpp"

namespace llama {
namespace {

class Plain : public Execution {
 public:
  Plain(LanguageModel model, const RankOptions& options) : model_(std::move(model)) {
    const bool use_cuda = options.device != "cpu" && torch::cuda::is_available();
    device_ = use_cuda ? torch::Device(torch::kCUDA, 0) : torch::Device(torch::kCPU);
    model_->to(device_);
  }

  int rank() const override { return 0; }
  int ranks() const override { return 1; }
  torch::Device device() const override { return device_; }
  double mean_over_ranks(double value, const std::string&) override { return value; }
  int64_t from_rank0(int64_t value) override { return value; }

  void clip_gradients(double max_norm) override {
    torch::NoGradGuard no_grad;
    double sum_of_squares = 0;
    for (const auto& parameter : model_->parameters())
      sum_of_squares += std::pow(parameter.grad().norm().item<double>(), 2);
    const double scale = std::min(1.0, max_norm / (std::sqrt(sum_of_squares) + 1e-6));
    if (scale == 1.0) return;
    for (const auto& parameter : model_->parameters()) parameter.grad().mul_(scale);
  }

  torch::Tensor predict(const torch::Tensor& tokens) override {
    torch::NoGradGuard no_grad;
    return model_->forward(tokens);
  }

  HeldBytes held_bytes() const override {
    int64_t bytes = 0;
    for (const auto& parameter : model_->parameters())
      bytes += static_cast<int64_t>(parameter.nbytes());
    return {bytes, bytes};
  }

 private:
  LanguageModel model_;
  torch::Device device_ = torch::kCPU;
};

}  // namespace

std::unique_ptr<Execution> run_plain(LanguageModel model, const RankOptions& options) {
  return std::make_unique<Plain>(std::move(model), options);
}

}  // namespace llama
