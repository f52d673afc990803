#include "property/plain_training.hpp"

#include <torch/nn/utils/clip_grad.h>

#include <cmath>
#include <limits>
#include <map>

#include "property/random_tree.hpp"

namespace fsdp::test {
namespace {

namespace init = torch::nn::init;
namespace optim = torch::optim;
using at::Tensor;
using Tensors = std::vector<Tensor>;

// What follows is written as LibTorch's users write it. An eps is large, or the rounding of gradients that are zero in
// exact arithmetic would be blown up to full-size steps. Rates are small: what is rounded in float grows with each step.

std::unique_ptr<optim::Optimizer> make_optimizer(const Tensors& parameters, const PlainCode& drawn) {
  const double decay = drawn.decays ? 0.1 : 0;
  switch (drawn.optimizer) {
    case PlainCode::Optimizer::kAdamW:
      return std::make_unique<optim::AdamW>(
          parameters, optim::AdamWOptions(0.02).eps(1e-2).weight_decay(decay).amsgrad(drawn.is_variant));
    case PlainCode::Optimizer::kAdam:
      return std::make_unique<optim::Adam>(
          parameters, optim::AdamOptions(0.02).eps(1e-2).weight_decay(decay).amsgrad(drawn.is_variant));
    case PlainCode::Optimizer::kSgd:
      return std::make_unique<optim::SGD>(
          parameters, optim::SGDOptions(0.05).momentum(0.9).weight_decay(decay).nesterov(drawn.is_variant));
    case PlainCode::Optimizer::kRmsprop:
      return std::make_unique<optim::RMSprop>(
          parameters,
          optim::RMSpropOptions(0.004).alpha(0.9).eps(1e-2).weight_decay(decay).momentum(0.5).centered(drawn.is_variant));
    case PlainCode::Optimizer::kAdagrad:
      return std::make_unique<optim::Adagrad>(
          parameters, optim::AdagradOptions(0.02).eps(1e-2).weight_decay(decay).lr_decay(drawn.is_variant ? 0.1 : 0));
  }
  throw std::logic_error("no such optimizer");
}

std::optional<double> clip_gradients(const Tensors& parameters, PlainCode::Clip clip, double max_norm) {
  switch (clip) {
    case PlainCode::Clip::kNone: return std::nullopt;
    case PlainCode::Clip::kNorm1: return torch::nn::utils::clip_grad_norm_(parameters, max_norm, 1);
    case PlainCode::Clip::kNorm2: return torch::nn::utils::clip_grad_norm_(parameters, max_norm);
    case PlainCode::Clip::kNormInf:
      return torch::nn::utils::clip_grad_norm_(parameters, max_norm, std::numeric_limits<double>::infinity());
    case PlainCode::Clip::kValue: torch::nn::utils::clip_grad_value_(parameters, max_norm); return std::nullopt;
    case PlainCode::Clip::kOwnLoop: break;
  }
  auto total = torch::zeros({}, at::kDouble);
  for (const auto& p : parameters)
    if (p.grad().defined()) total += p.grad().norm().pow(2);
  const double norm = total.sqrt().item<double>();
  if (norm > max_norm)
    for (const auto& p : parameters)
      if (p.grad().defined()) p.grad().mul_(max_norm / norm);
  return norm;
}

Tensor penalty_of(const Tensors& parameters, PlainCode::Penalty penalty) {
  Tensor sum;
  for (const auto& p : parameters) {
    const auto term = penalty == PlainCode::Penalty::kSquares ? p.pow(2).sum() : p.abs().sum();
    sum = sum.defined() ? sum + term : term;
  }
  return sum.defined() ? 1e-2 * sum : sum;
}

void initialise(const NamedTensors& parameters, const PlainCode& drawn, const LeftAlone& left) {
  Draw draw(drawn.seed + 1);
  for (const auto& [name, p] : parameters) {
    const bool is_chosen = draw.chance(drawn.init_probability);
    const auto kind = draw.number(0, 9);
    if (!is_chosen || left.by_init(name)) continue;
    if (kind == 0)
      init::zeros_(p);
    else if (kind <= 3 || p.dim() < 2)
      init::normal_(p, 0, 0.4);
    else if (kind <= 5)
      init::xavier_uniform_(p, 1.2);
    else if (kind <= 7 || p.dim() > 2 || p.size(0) == 1 || p.size(1) == 1)  // of which orthogonal_ gathers, see `start`
      init::kaiming_normal_(p);
    else
      init::orthogonal_(p, 0.7);
  }
}

/// What an optimizer knows of one parameter; the name of each is its place.
Tensors tensors_of_state(const optim::OptimizerParamState& state) {
  if (const auto* adamw = dynamic_cast<const optim::AdamWParamState*>(&state))
    return {adamw->exp_avg(), adamw->exp_avg_sq(), adamw->max_exp_avg_sq()};
  if (const auto* adam = dynamic_cast<const optim::AdamParamState*>(&state))
    return {adam->exp_avg(), adam->exp_avg_sq(), adam->max_exp_avg_sq()};
  if (const auto* sgd = dynamic_cast<const optim::SGDParamState*>(&state)) return {sgd->momentum_buffer()};
  if (const auto* rms = dynamic_cast<const optim::RMSpropParamState*>(&state))
    return {rms->square_avg(), rms->momentum_buffer(), rms->grad_avg()};
  return {dynamic_cast<const optim::AdagradParamState&>(state).sum()};
}

class PlainTraining final : public TrainingCode {
 public:
  PlainTraining(std::shared_ptr<torch::nn::Module> module, const PlainCode& drawn, LeftAlone left, OwnCollectives own)
      : module_(std::move(module)), drawn_(drawn), left_(std::move(left)), own_(std::move(own)) {}

  void before_sharding() override {
    if (drawn_.is_built_before) optimizer_ = make_optimizer(parameters(), drawn_);
    if (drawn_.average == PlainCode::Average::kOfWhole) copy_averages();
  }

  /// Ranks that are threads share LibTorch's generator, so they take turns, in which none may wait for another.
  void start() override {
    const auto own = own_();
    seeded(drawn_.seed, [&] { return initialise(unique_parameters(*module_), drawn_, left_), 0; });
    if (!optimizer_) optimizer_ = make_optimizer(parameters(), drawn_);
    if (drawn_.average == PlainCode::Average::kOfShards) copy_averages();
  }

  void zero_grad() override { optimizer_->zero_grad(); }

  Tensor penalty() override {
    if (drawn_.penalty == PlainCode::Penalty::kNone) return {};
    const auto own = own_();
    Tensors penalised;
    for (const auto& [name, parameter] : unique_parameters(*module_))
      if (!left_.by_penalty(name)) penalised.push_back(parameter);
    return penalty_of(penalised, drawn_.penalty);
  }

  std::optional<double> clip() override {
    const auto own = own_();
    return clip_gradients(parameters(), drawn_.clip, drawn_.max_norm);
  }

  void step() override {
    const auto own = own_();
    optimizer_->step();
    if (averages_.empty()) return;
    torch::NoGradGuard no_grad;
    const auto now = parameters();
    for (size_t i = 0; i < now.size(); ++i) averages_[i].mul_(0.7).add_(now[i], 0.3);
  }

  std::vector<Kept> kept() const override {
    std::vector<Kept> all;
    const auto now = parameters();
    for (size_t i = 0; i < now.size(); ++i) all.push_back({"clipped gradient", i, now[i].grad()});
    for (size_t i = 0; i < averages_.size(); ++i) all.push_back({"average", i, averages_[i]});
    const auto& held = optimizer_->param_groups().at(0).params();
    for (size_t i = 0; i < held.size(); ++i) {
      const auto state = optimizer_->state().find(held[i].unsafeGetTensorImpl());
      if (state == optimizer_->state().end()) continue;
      size_t place = 0;
      for (auto& tensor : tensors_of_state(*state->second))
        all.push_back({fmt::format("tensor {} of the optimizer's state", place++), i, std::move(tensor)});
    }
    return all;
  }

 private:
  /// Each once: LibTorch's own list names a tied one twice.
  Tensors parameters() const {
    Tensors tensors;
    for (auto& [name, parameter] : unique_parameters(*module_)) tensors.push_back(parameter);
    return tensors;
  }
  void copy_averages() {
    torch::NoGradGuard no_grad;
    for (const auto& parameter : parameters()) averages_.push_back(parameter.clone());
  }

  std::shared_ptr<torch::nn::Module> module_;
  PlainCode drawn_;
  LeftAlone left_;
  OwnCollectives own_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  Tensors averages_;
};

constexpr const char* kOptimizers[] = {"AdamW", "Adam", "SGD", "RMSprop", "Adagrad"};
constexpr const char* kClips[] = {"not clipped", "clipped by norm 1", "clipped by norm 2", "clipped by the largest",
                                  "clipped by value", "clipped in a loop"};
constexpr const char* kPenalties[] = {"", ", squares penalised", ", absolute values penalised"};
constexpr const char* kAverages[] = {"", ", averaged", ", averaged in whole copies"};

template <class T>
size_t at_place(T value) {
  return static_cast<size_t>(value);
}

}  // namespace

std::optional<PlainCode> draw_plain_code(const RandomTree& tree) {
  Draw draw(tree.seed * 32452843 + 17);
  if (!draw.chance(0.75)) return std::nullopt;
  using enum PlainCode::Optimizer;
  using Clip = PlainCode::Clip;
  using Penalty = PlainCode::Penalty;
  using Average = PlainCode::Average;
  const auto& training = tree.training;
  PlainCode code{.seed = tree.seed * 7 + 12};
  code.optimizer = draw.one_of<PlainCode::Optimizer>({kAdamW, kAdam, kSgd, kRmsprop, kAdagrad});
  code.is_variant = draw.chance(0.5);
  code.decays = draw.chance(0.5);
  code.is_built_before = draw.chance(0.4);
  if (draw.chance(0.5)) code.init_probability = draw.one_of<double>({0.3, 1.0});
  auto clip = draw.one_of<Clip>({Clip::kNorm1, Clip::kNorm2, Clip::kNormInf, Clip::kValue, Clip::kOwnLoop});
  auto penalty = draw.chance(0.6) ? Penalty::kNone : draw.one_of<Penalty>({Penalty::kSquares, Penalty::kAbsolute});
  auto average = draw.chance(0.5) ? Average::kNone : draw.one_of<Average>({Average::kOfShards, Average::kOfWhole});

  // Some are this rank's rows, ordinary tensors, or differ by rank: neither says what the whole's norm is.
  const bool has_rows = training.tensor_ranks > 1 && tree.other_layout_probability > 0;
  const bool has_own_experts = tree.expert_ranks > 1 && tree.experts_differ;
  if (has_rows || has_own_experts) clip = Clip::kValue;
  if (has_rows) penalty = Penalty::kNone;
  // Its slope jumps at zero: what is zero but for rounding would get either sign.
  if (penalty == Penalty::kAbsolute && (training.is_delicate || training.dtype == at::kFloat || training.param_dtype))
    penalty = Penalty::kSquares;
  // In 16 bits more than two gradients of one tensor round in their order, which a view from before the first gather changes.
  if (training.is_low() && contains(tree.root, [](const Part& part) { return part.kind == "borrow"; }))
    penalty = Penalty::kNone;
  // A member that is cut has a part's sizes, and its copy would; its gradient has the whole's.
  if (training.tensor_ranks > 1 || tree.expert_ranks > 1) {
    code.is_built_before = false;
    if (average == Average::kOfWhole) average = Average::kOfShards;
  }
  // Momentum is kept in the dtype of its first gradient, which may be one of 16 bits where nothing is added to it.
  if (training.is_low() && code.optimizer == kSgd) code.decays = true;

  if (training.max_norm) code.clip = clip;
  code.max_norm = training.max_norm.value_or(0);
  code.penalty = penalty;
  code.average = average;
  return code;
}

std::string describe(const PlainCode& code) {
  return fmt::format("LibTorch's {}{}{}{}, {}{}{}{}\n", kOptimizers[at_place(code.optimizer)],
                     code.is_variant ? " in its variant" : "", code.decays ? ", decaying" : "",
                     code.is_built_before ? ", built before" : "", kClips[at_place(code.clip)],
                     kPenalties[at_place(code.penalty)], kAverages[at_place(code.average)],
                     code.init_probability > 0 ? fmt::format(", initialised with {}", code.init_probability) : "");
}

std::shared_ptr<TrainingCode> make_code(std::shared_ptr<torch::nn::Module> module, const PlainCode& drawn, LeftAlone left,
                                        OwnCollectives own) {
  return std::make_shared<PlainTraining>(std::move(module), drawn, std::move(left), std::move(own));
}

}  // namespace fsdp::test
