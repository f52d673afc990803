#include "property/grad_dtypes.hpp"

#include <algorithm>

#include "property/parts.hpp"

namespace fsdp::test {
namespace {

/// In which dtype a recurrent kernel makes a bias's gradient in 16 bits depends on the processor.
bool is_of_kernel(const Training& training, const std::string& name) {
  return training.is_low() && (name.find("lstm.") != std::string::npos || name.find("gru.") != std::string::npos);
}

GradDtype draw_grad_dtype(Draw& draw, const Training& training, const std::string& name) {
  std::vector<GradDtype> choices{{.is_set = true, .dtype = training.dtype}, {.is_set = true, .dtype = at::kDouble}};
  if (training.rounds_gradients) choices.push_back({.is_set = true, .dtype = at::kFloat});
  // A norm over 16 bits would be compared with one over more.
  const bool may_be_low = training.is_low() && !training.max_norm;
  if (may_be_low) choices.push_back({.is_set = true, .dtype = training.param_dtype});
  const auto reduced_in = training.gradient_dtypes().reduced_in;
  // Where some ranks have no gradient, nothing says in which dtype they reduce.
  const bool is_known = training.reduce_dtype || (!training.reduce_unused && !is_of_kernel(training, name));
  if (is_known && (may_be_low || c10::elementSize(reduced_in) > 2)) choices.push_back({.is_set = true});
  return draw.one_of(choices);
}

}  // namespace

GradDtypes::GradDtypes(const RandomTree& tree, const torch::nn::Module& body, const std::vector<at::Tensor>& ignored)
    : training_(tree.training) {
  Draw draw(tree.seed * 7 + 11);
  for (const auto& [name, parameter] : unique_parameters(body)) {
    if (name.ends_with(kWidenedWeight)) widened_.push_back(parameter);
    if (!draw.chance(tree.grad_dtype_probability) || is_among(parameter, ignored)) continue;
    DrawnGradDtype one{.by = draw.chance(0.5) ? By::kSharded : By::kMember,
                       .name = name,
                       .member = parameter,
                       .is_before = draw.chance(0.5),
                       .by_step = {}};
    const int64_t first = one.is_before ? 0 : draw.number(0, training_.steps - 1);
    for (int step = 0; step < training_.steps; ++step) {
      auto now = one.by_step.empty() ? GradDtype() : one.by_step.back();
      if (step == first || (step > first && draw.chance(0.4))) now = draw_grad_dtype(draw, training_, name);
      one.by_step.push_back(now);
    }
    drawn_.push_back(std::move(one));
  }
}

void GradDtypes::set_before_sharding() const {
  for (const auto& one : drawn_)
    if (one.is_before) one.member.set_grad_dtype(one.by_step.front().dtype);
}

void GradDtypes::set_for_step(const NamedTensors& registered) const {
  for (const auto& one : drawn_) {
    const auto before = step_ > 0 ? one.by_step[step_ - 1] : one.is_before ? one.by_step.front() : GradDtype();
    const auto now = one.by_step[step_];
    if (now == before) continue;
    chosen(one.by, registered, one.name, one.member).set_grad_dtype(now.dtype);
  }
}

GradientDtypes GradDtypes::of(const at::Tensor& parameter) const {
  const auto found = std::find_if(drawn_.begin(), drawn_.end(),
                                  [&](const DrawnGradDtype& one) { return one.member.is_same(parameter); });
  const auto asked = found == drawn_.end() ? GradDtype() : found->by_step[step_];
  const auto computed = training_.param_dtype.value_or(training_.dtype);
  const auto made = is_among(parameter, widened_) ? wider(computed) : computed;
  const auto reduced = training_.reduce_dtype.value_or(asked.is_set ? asked.dtype.value_or(made) : computed);
  return {.reduced_in = reduced,
          .kept_in = asked.is_set ? asked.dtype.value_or(reduced) : training_.dtype};
}

void GradDtypes::round() const {
  for (const auto& one : drawn_)
    if (auto gradient = one.member.grad(); gradient.defined())
      gradient.copy_(gradient.to(of(one.member).kept_in));
}

}  // namespace fsdp::test
