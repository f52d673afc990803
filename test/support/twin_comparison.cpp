#include "support/twin_comparison.hpp"

#include <cmath>

namespace fsdp::test {
namespace {

at::Tensor part_of(const Rank& rank, const Workload& workload, const at::Tensor& parameter, const at::Tensor& full) {
  if (!full.defined() || !workload.own_part || !is_fsdp_parameter(parameter)) return local_elements(parameter, full);
  return workload.own_part(rank, parameter, full);
}

/// `actual`, a value or gradient of `parameter`, is this rank's part of `full`, within the tolerance of the
/// whole tensor's largest element.
void check_part(const Rank& rank, double tolerance, const at::Tensor& actual, const at::Tensor& part,
                const at::Tensor& full, const std::string& what) {
  if (part.defined() && part.numel() > 0) {
    double most = part.abs().max().item<double>();
    if (most > 0) tolerance *= full.abs().max().item<double>() / most;
  }
  rank.check_close(actual.defined() ? to_local(actual).reshape({-1}) : actual, part, what, tolerance);
}

/// elements: 1-D, in the order of dimensions.
void assign(at::Tensor to, const at::Tensor& elements) {
  at::NoGradGuard no_grad;
  const auto piece = to_local(to);
  piece.copy_(elements.view(piece.sizes()));
}

/// Of terms that are `magnitude` together: each of n additions, a division and a cast rounds to half a unit in the
/// last place of what there is by then, which is no more than all terms. So (n + 1) halves are a bound, of which many
/// roundings, to either side, stay far below: they grow like the root of n. Of 24 terms, the most that are
/// drawn, one alone is still more than what bfloat16 is allowed.
/// What they are kept in rounds both sums to it, maybe to its next number on one side.
at::Tensor allowed_of_sum(const Training& training, const GradientDtypes& dtypes, const at::Tensor& magnitude) {
  const double half_unit = std::max(segment_of(dtypes.reduced_in), segment_of(training.dtype)) / 2;
  const double terms = training.world_size * training.micro_batches;
  // Half precision has few digits left near its smallest numbers.
  const bool is_half = dtypes.reduced_in == at::kHalf || dtypes.kept_in == at::kHalf;
  const double floor = is_half ? (terms + 2) * 6e-8 : 1e-30;
  const double kept = segment_of(dtypes.kept_in) > segment_of(training.dtype) ? segment_of(dtypes.kept_in) : 0;
  return magnitude * (half_unit * std::min(terms + 1, 2 + 1.5 * std::sqrt(terms)) + kept) + floor;
}

void check_sum(const Rank& rank, const at::Tensor& actual, const at::Tensor& part, const at::Tensor& allowed,
               const std::string& what) {
  rank.check_equal(actual.defined(), part.defined(), what + ": there is one");
  if (!actual.defined() || !part.defined() || part.numel() == 0) return;
  const auto error = (actual.detach().reshape({-1}).to(at::kDouble) - part.to(at::kDouble)).abs();
  rank.check((error <= allowed).all().item<bool>(),
             fmt::format("{}: differs by {:.3g} times what is allowed", what, (error / allowed).max().item<double>()));
}

}  // namespace

GradientDtypes gradient_dtypes(const Workload& workload, const Training& training, const at::Tensor& parameter) {
  return workload.gradient_dtypes ? workload.gradient_dtypes(parameter) : training.gradient_dtypes();
}

double segment_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16: return 0x1p-7;
    case at::kHalf: return 0x1p-10;
    case at::kFloat: return 0x1p-23;
    default: return 0x1p-52;
  }
}

void compare_gradients(const Rank& rank, const Workload& workload, const Training& training,
                       const NamedTensors& parameters, const PlainRecord::Step& expected, int step) {
  rank.check_equal(parameters.size(), expected.gradients.size(), "number of parameters");
  if (parameters.size() != expected.gradients.size()) return;
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto& [name, parameter] = parameters[i];
    auto what = fmt::format("step {}: gradient of {}", step, name);
    rank.check_equal(name, expected.gradients[i].first, "name of a parameter");
    const auto& full = expected.gradients[i].second;
    const auto part = part_of(rank, workload, parameter, full);
    const bool is_sharded = is_fsdp_parameter(parameter);
    const auto dtypes = gradient_dtypes(workload, training, is_sharded ? fsdp::unsharded(parameter) : parameter);
    auto gradient = to_local(parameter.grad());
    if (gradient.defined() && is_sharded) {
      rank.check_equal(std::string(c10::toString(gradient.scalar_type())), std::string(c10::toString(dtypes.kept_in)),
                       what + ": its dtype");
      gradient = gradient.to(training.dtype);
    }
    if (!training.is_low()) {
      check_part(rank, expected.tolerance, gradient, part, full, what);
      if (!training.rounds_gradients) continue;
    } else {
      const auto allowed = allowed_of_sum(training, dtypes, expected.magnitudes[i].second);
      check_sum(rank, gradient, part, part_of(rank, workload, parameter, allowed), what);
    }
    // From here on both go on with one gradient, and later from one weight: where they are rounded the smallest
    // difference between them may become a large one.
    if (parameter.grad().defined() && part.defined()) assign(parameter.mutable_grad(), part);
  }
}

void compare_weights(const Rank& rank, const Workload& workload, const Training& training,
                     const NamedTensors& parameters, const NamedTensors& expected, double tolerance,
                     const std::string& when) {
  for (size_t i = 0; i < parameters.size() && i < expected.size(); ++i) {
    auto& [name, parameter] = parameters[i];
    const auto& full = expected[i].second;
    const auto part = part_of(rank, workload, parameter, full);
    check_part(rank, tolerance, parameter.detach(), part, full, fmt::format("{}: weight {}", when, name));
    if (training.is_low()) assign(parameter, part);
  }
}

void compare_kept(const Rank& rank, const Workload& workload, const NamedTensors& parameters,
                  const std::vector<TrainingCode::Kept>& found, const PlainRecord::Step& expected, int step) {
  rank.check_equal(found.size(), expected.kept.size(), "number of tensors that are kept");
  for (size_t i = 0; i < found.size() && i < expected.kept.size(); ++i) {
    const auto& [name, index, full] = expected.kept[i];
    const auto& parameter = parameters[found[i].parameter].second;
    const auto what = fmt::format("step {}: {} of {}", step, name, parameters[found[i].parameter].first);
    rank.check_equal(std::pair(found[i].name, found[i].parameter), std::pair(name, index), what);
    const bool is_whole = found[i].tensor.defined() && is_dtensor(parameter) && !is_dtensor(found[i].tensor);
    const auto part = is_whole && full.defined() ? full.reshape({-1}) : part_of(rank, workload, parameter, full);
    check_part(rank, expected.kept_tolerance, found[i].tensor, part, full, what);
  }
}

void compare_whole(const Rank& rank, const std::vector<TrainingCode::Kept>& found, const PlainRecord::Step& expected) {
  for (size_t i = 0; i < found.size() && i < expected.kept.size(); ++i) {
    const auto& tensor = found[i].tensor;
    const auto& full = expected.kept[i].tensor;
    if (!is_dtensor(tensor) || !full.defined() || tensor.sizes() != full.sizes()) continue;
    rank.check_close(full_tensor(tensor), full, fmt::format("whole {} of parameter {}", found[i].name, found[i].parameter),
                     expected.kept_tolerance);
  }
}

}  // namespace fsdp::test
