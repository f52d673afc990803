#include "property/between_steps.hpp"

#include "property/run_watch.hpp"

namespace fsdp::test {

bool may_be_frozen(const RandomTree& tree, const std::string& name) {
  // What a list or dict hands out is the sharded parameter: frozen, and with a batch that needs
  // no gradient, no operator records autograd on it, so it is the shard.
  const bool in_container = name.find("list.") != std::string::npos || name.find("dict.") != std::string::npos;
  // Where ranks choose differently, a frozen choice would cut the graph on some ranks only, and with
  // it what the parts in front of it gather in backward.
  const bool is_choice = tree.training.reduce_unused && (name.ends_with(".odd") || name.ends_with(".even"));
  return !in_container && !is_choice;
}

BetweenSteps::BetweenSteps(const RandomTree& tree, std::shared_ptr<torch::nn::Module> model,
                           std::shared_ptr<torch::nn::Module> body, std::shared_ptr<GradDtypes> dtypes, Evaluate evaluate)
    : tree_(tree), model_(std::move(model)), body_(std::move(body)), dtypes_(std::move(dtypes)), evaluate_(std::move(evaluate)),
      writes_(tree, *model_) {
  if (tree_.toggled_probability > 0) draw_toggles();
  draw_evaluations();
  // Statistics and experts are a rank's own. In 16 bits a sum is rounded as often as it is written.
  is_comparable_ = model_->buffers().empty() && tree_.expert_ranks == 1 && !tree_.training.is_low();
}

/// Of one parameter each, or of all that a module has.
void BetweenSteps::draw_toggles() {
  Draw draw(tree_.seed * 7 + 9);
  std::vector<at::Tensor> taken;
  const auto all = unique_parameters(*body_);
  const auto add = [&](const std::vector<at::Tensor>& together) {
    Toggle toggle{.by = draw.chance(0.7) ? By::kSharded : By::kMember};
    for (const auto& [name, parameter] : all) {
      if (!is_among(parameter, together) || is_among(parameter, taken)) continue;
      if (!may_be_frozen(tree_, name) || !parameter.requires_grad()) continue;
      toggle.names.push_back(name);
      toggle.members.push_back(parameter);
      taken.push_back(parameter);
    }
    for (int step = 0; step < tree_.training.steps; ++step) toggle.is_trainable.push_back(draw.chance(0.5));
    if (!toggle.names.empty()) toggles_.push_back(std::move(toggle));
  };
  for (const auto& module : body_->modules(/*include_self=*/false))
    if (draw.chance(tree_.toggled_probability / 3)) add(module->parameters());
  for (const auto& [name, parameter] : all)
    if (draw.chance(tree_.toggled_probability)) add({parameter});
}

void BetweenSteps::draw_evaluations() {
  Draw places(tree_.seed * 7 + 13), forms(tree_.seed * 7 + 14);
  for (int step = 0; step < tree_.training.steps; ++step) {
    auto& one = evaluations_.emplace_back();
    if (places.chance(tree_.evaluated_probability)) one.before = places.number(0, static_cast<int64_t>(toggles_.size()));
    one.is_recorded = forms.chance(0.6);
    one.outlives_writes = forms.chance(0.5);
  }
}

void BetweenSteps::set_dtypes(int step, const Sharded* sharded) {
  dtypes_->begin_step(step);
  if (sharded == nullptr) return;
  dtypes_->set_for_step(unique_parameters(*body_));
  for (const auto& [name, parameter] : unique_parameters(*model_)) {
    if (!is_fsdp_parameter(parameter)) continue;
    const auto handle = fsdp::unsharded(parameter);
    note_gradient_dtypes(sharded->log, sharded->groups, handle, dtypes_->of(handle));
  }
}

void BetweenSteps::set_trainable(const Toggle& toggle, int step, const Sharded* sharded) const {
  const auto registered = unique_parameters(*body_);
  const bool is_trainable = toggle.is_trainable[static_cast<size_t>(step)];
  for (size_t i = 0; i < toggle.names.size(); ++i) {
    const auto& member = toggle.members[i];
    if (sharded != nullptr) note_trainable(sharded->log, sharded->groups, member, is_trainable);
    chosen(toggle.by, registered, toggle.names[i], member).set_requires_grad(is_trainable);
  }
}

void BetweenSteps::write(int step, ValueWrites::Place place, const Sharded* sharded) const {
  const auto own = sharded != nullptr ? sharded->own_collectives() : nullptr;
  writes_.apply(step, place, unique_parameters(*model_));
}

std::vector<at::Tensor> BetweenSteps::run(int step, const Sharded* sharded) {
  set_dtypes(step, sharded);
  write(step, ValueWrites::Place::kFirst, sharded);
  std::vector<at::Tensor> evaluated;
  const auto& evaluation = evaluations_[static_cast<size_t>(step)];
  for (size_t i = 0; i <= toggles_.size(); ++i) {
    if (evaluation.before == static_cast<int64_t>(i)) {
      at::Tensor loss;
      if (sharded != nullptr || is_comparable_) {
        const at::AutoGradMode mode(evaluation.is_recorded);
        loss = evaluate_(step);
      }
      if (is_comparable_) evaluated.push_back(loss.detach().clone());
      if (!evaluation.outlives_writes) loss.reset();
      write(step, ValueWrites::Place::kBehindEvaluation, sharded);
    }
    if (i < toggles_.size()) set_trainable(toggles_[i], step, sharded);
  }
  return evaluated;
}

}  // namespace fsdp::test
