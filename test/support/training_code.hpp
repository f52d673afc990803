#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::test {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Parameters by their first name, each tensor once.
NamedTensors unique_parameters(const torch::nn::Module& module);

/// What a training program does to parameters outside forward and backward. One object for one model; the same code
/// runs on the plain model and on the sharded one.
class TrainingCode {
 public:
  /// What is compared after each step: named, with the parameter that it belongs to by its position, maybe undefined.
  struct Kept {
    std::string name;
    size_t parameter;
    at::Tensor tensor;
  };

  virtual ~TrainingCode() = default;
  /// In front of fully_shard, or of nothing.
  virtual void before_sharding() {}
  /// Before the first step.
  virtual void start() = 0;
  virtual void zero_grad() = 0;
  /// Is added to the loss of each micro-batch; undefined: nothing is.
  virtual at::Tensor penalty() { return {}; }
  /// The norm, if it clips by one.
  virtual std::optional<double> clip() = 0;
  virtual void step() = 0;
  virtual std::vector<Kept> kept() const { return {}; }
};

/// AdamW, and fsdp::clip_grad_norm_ where there is a max_norm; the plain model is clipped by hand.
std::shared_ptr<TrainingCode> adamw_code(std::shared_ptr<torch::nn::Module> module, bool weight_decay,
                                         std::optional<double> max_norm);
std::unique_ptr<torch::optim::Optimizer> make_adamw(const torch::nn::Module& module, bool weight_decay);

}  // namespace fsdp::test
