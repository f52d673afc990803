#include "support/training_code.hpp"

#include <algorithm>
#include <cmath>
#include <set>

#include <fsdp/fsdp.hpp>

namespace fsdp::test {
namespace {

std::vector<at::Tensor> tensors_of(const NamedTensors& named) {
  std::vector<at::Tensor> tensors;
  for (auto& [name, tensor] : named) tensors.push_back(tensor);
  return tensors;
}

double total_norm(const NamedTensors& parameters) {
  double sum = 0;
  for (auto& [name, parameter] : parameters)
    if (parameter.grad().defined()) sum += parameter.grad().to(at::kDouble).square().sum().item<double>();
  return std::sqrt(sum);
}

/// Each tensor once, which LibTorch's own does not do for tied weights.
double clip_plain(const NamedTensors& parameters, double max_norm) {
  at::NoGradGuard no_grad;
  const double norm = total_norm(parameters);
  for (auto& [name, parameter] : parameters)
    if (parameter.grad().defined()) parameter.mutable_grad().mul_(std::min(1.0, max_norm / (norm + 1e-6)));
  return norm;
}

class AdamWCode final : public TrainingCode {
 public:
  AdamWCode(std::shared_ptr<torch::nn::Module> module, bool weight_decay, std::optional<double> max_norm)
      : module_(std::move(module)), weight_decay_(weight_decay), max_norm_(max_norm) {}

  void start() override { optimizer_ = make_adamw(*module_, weight_decay_); }
  void zero_grad() override { optimizer_->zero_grad(); }
  std::optional<double> clip() override {
    if (!max_norm_) return std::nullopt;
    const auto parameters = unique_parameters(*module_);
    const bool is_sharded = std::ranges::any_of(parameters, [](const auto& one) { return is_fsdp_parameter(one.second); });
    return is_sharded ? clip_grad_norm_(tensors_of(parameters), *max_norm_) : clip_plain(parameters, *max_norm_);
  }
  void step() override { optimizer_->step(); }

 private:
  std::shared_ptr<torch::nn::Module> module_;
  bool weight_decay_;
  std::optional<double> max_norm_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

}  // namespace

NamedTensors unique_parameters(const torch::nn::Module& module) {
  NamedTensors found;
  std::set<at::TensorImpl*> seen;
  for (auto& item : module.named_parameters())
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) found.emplace_back(item.key(), item.value());
  return found;
}

std::unique_ptr<torch::optim::Optimizer> make_adamw(const torch::nn::Module& module, bool weight_decay) {
  // A large eps, or AdamW would blow up the rounding of gradients that are zero in exact
  // arithmetic (a bias in front of a norm) to full-size steps.
  auto options = torch::optim::AdamWOptions(2e-2).eps(1e-2).weight_decay(weight_decay ? 0.1 : 0.0);
  return std::make_unique<torch::optim::AdamW>(tensors_of(unique_parameters(module)), options);
}

std::shared_ptr<TrainingCode> adamw_code(std::shared_ptr<torch::nn::Module> module, bool weight_decay,
                                         std::optional<double> max_norm) {
  return std::make_shared<AdamWCode>(std::move(module), weight_decay, max_norm);
}

}  // namespace fsdp::test
