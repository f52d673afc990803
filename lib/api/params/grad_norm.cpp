#include <ATen/ATen.h>

#include <cmath>
#include <limits>
#include <map>

#include "api/params/find_param.hpp"
#include "api/params/grad_norm.hpp"
#include "base/require.hpp"
#include "comm/watch/awaited_collectives.hpp"
#include "dispatch/residency.hpp"
#include "fsdp/parameters.hpp"
#include "root/group_port.hpp"

// Norms of gradients that are spread over ranks. With p the norm type, the global norm is
// (sum over all elements of |g|^p)^(1/p), or the largest (smallest) |g| for p = (-)infinity. Elements that several
// ranks hold (replicas, plain parameters) count once. For p = 0 gradients count: see ZeroNorm.
namespace fsdp {

namespace {

/// Gradients that are cut over the same ranks: their powers add up there.
struct NormPart {
  std::vector<std::shared_ptr<Communicator>> groups;  // of several ranks; none: every rank holds them whole
  c10::Device device;  // that they communicate on: gradients may live elsewhere
  std::vector<at::Tensor> gradients = {};  // of its parameters; undefined where one has none
  at::Tensor power = {};  // over the ranks seen so far
};

/// The ranks that a parameter's gradient is cut over: data-parallel ones first, which are last to be added up.
std::vector<std::shared_ptr<Communicator>> groups_of(const FoundParam& found) {
  std::vector<std::shared_ptr<Communicator>> groups;
  const auto& info = found.group->identity().mesh_info;
  if (info.shard_size() > 1) groups.push_back(info.shard_group);
  const auto& more = found.param().spec.reach.summed_over;
  groups.insert(groups.end(), more.begin(), more.end());
  return groups;
}

/// The same of a DTensor that is no parameter of a module; none of any other tensor.
std::vector<std::shared_ptr<Communicator>> groups_of(const at::Tensor& tensor) {
  std::vector<std::shared_ptr<Communicator>> groups;
  if (!is_dtensor(tensor)) return groups;
  const DTensor dtensor(tensor);
  for (int m = 0; m < dtensor.mesh().ndim(); ++m)
    if (dtensor.mesh().size(m) > 1 && sharded_dim(dtensor.placements()[static_cast<size_t>(m)]))
      groups.push_back(dtensor.mesh().get_group(m));
  return groups;
}

NormPart& part_of(std::vector<NormPart>& parts, const std::vector<std::shared_ptr<Communicator>>& groups,
                  c10::Device device) {
  const auto known = std::find_if(parts.begin(), parts.end(),
                                  [&](const NormPart& part) { return part.groups == groups; });
  return known != parts.end() ? *known
                              : parts.emplace_back(groups, device);
}

/// Zeros between the parameters of a local shard count where small values do.
enum class SplitsShards { kYes, kNo };
SplitsShards splits_shards_for(double norm_type) { return norm_type > 0 ? SplitsShards::kNo : SplitsShards::kYes; }

void add_members(const FoundParam& shard, std::vector<at::Tensor>& gradients) {
  const auto& all = shard.group->parts().local_shards->all();
  const auto is_it = [&](const LocalShards::Class& one) { return one.members.front() == shard.index; };
  for (const size_t member : std::ranges::find_if(all, is_it)->members)
    gradients.push_back(shard.group->params()[member].local_tensor().grad());
}

std::vector<NormPart> split_by_group(const std::vector<at::Tensor>& parameters, const char* caller,
                                     SplitsShards splits_shards) {
  std::vector<NormPart> parts;
  for (const auto& parameter : parameters) {
    auto found = find_param(parameter);
    require(!found || !found->is_unsharded_param || found->param().sharded.shared(),
            "{}: '{}' is an unsharded parameter (the tensor of a module's member); its gradient is on the sharded parameter. "
            "Pass model->parameters(), or fsdp::sharded(tensor)",
            caller, found ? found->param().name() : "");
    // A group takes part even where this rank has no gradient for it: its all-reduce is collective.
    const bool is_shard = !found && (found = find_local_shard(parameter));
    const auto groups = found ? groups_of(*found) : groups_of(parameter);
    const auto device = found && !groups.empty() ? found->group->identity().mesh_info.mesh.device() : parameter.device();
    auto& part = part_of(parts, groups, device);
    if (is_shard && splits_shards == SplitsShards::kYes)
      add_members(*found, part.gradients);
    else
      part.gradients.push_back(parameter.grad().defined() ? to_local(parameter.grad()) : at::Tensor());
  }
  return parts;
}

/// How values of gradients, and of ranks, come together.
class Norm {
 public:
  Norm(double p, ZeroNorm zero) : p_(p), zero_(zero) {}

  /// This rank's: |.|_p of all gradients together, to the power of p (of an infinity: as it is), in double; for p = 0 a number
  /// for each, above 0 where it counts.
  at::Tensor local(const NormPart& part) const;
  at::Tensor added(const at::Tensor& one, const at::Tensor& other) const;
  ReduceOp over_ranks() const {
    if (p_ == -kInfinity) return ReduceOp::kMin;
    return p_ == 0 || is_extreme() ? ReduceOp::kMax : ReduceOp::kSum;
  }
  /// A largest or a smallest value, of which backends lose a NaN.
  bool is_extreme() const { return std::isinf(p_); }
  /// From what all parts add up to.
  at::Tensor finished(const at::Tensor& total) const;

 private:
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();
  at::Tensor counted(const NormPart& part) const;
  double p_;
  ZeroNorm zero_;
};

at::Tensor Norm::counted(const NormPart& part) const {
  std::vector<at::Tensor> counts;
  for (const auto& gradient : part.gradients) {
    const bool is_one = zero_ == ZeroNorm::kDefined;
    auto count = !gradient.defined() || (!is_one && gradient.numel() == 0) ? at::zeros({}, at::kDouble)
                 : is_one                                                  ? at::ones({}, at::kDouble)
                                                                           : gradient.ne(0).any();
    counts.push_back(count.to(part.device, at::kDouble));
  }
  return counts.empty() ? at::zeros({0}, at::TensorOptions().dtype(at::kDouble).device(part.device)) : at::stack(counts);
}

at::Tensor Norm::local(const NormPart& part) const {
  if (p_ == 0) return counted(part);
  at::Tensor total;
  for (const auto& gradient : part.gradients) {
    if (!gradient.defined() || gradient.numel() == 0) continue;
    const auto norm = at::linalg_vector_norm(gradient, p_).to(at::kDouble);
    total = added(total.defined() ? total.to(norm.device()) : total, is_extreme() ? norm : norm.pow(p_));
  }
  const double nothing = p_ == -kInfinity ? kInfinity : 0;
  return total.defined() ? total.to(part.device)
                         : at::full({}, nothing, at::TensorOptions().dtype(at::kDouble).device(part.device));
}

at::Tensor Norm::added(const at::Tensor& one, const at::Tensor& other) const {
  if (!one.defined()) return other;
  if (p_ == 0) return at::cat({one, other});
  if (is_extreme()) return p_ > 0 ? at::maximum(one, other) : at::minimum(one, other);
  return one + other;
}

at::Tensor Norm::finished(const at::Tensor& total) const {
  if (p_ == 0) return total.gt(0).sum().to(at::kDouble);
  return is_extreme() ? total : total.pow(1 / p_);
}

/// The ranks' powers together, over the last of the part's groups. A maximum loses a NaN on some backends, so it travels as a
/// flag.
at::Tensor over_ranks(const NormPart& part, const Norm& norm, const char* caller) {
  auto& group = *part.groups.back();
  if (!norm.is_extreme()) {
    awaited::all_reduce(group, part.power, norm.over_ranks(), caller);
    return part.power;
  }
  const auto is_nan = part.power.isnan();
  const auto flag = is_nan.to(part.power.scalar_type());
  const bool is_least = norm.over_ranks() == ReduceOp::kMin;
  const auto both = at::stack({part.power.masked_fill(is_nan, 0), is_least ? -flag : flag});
  awaited::all_reduce(group, both, norm.over_ranks(), caller);
  return both[0].masked_fill(both[1].ne(0), std::numeric_limits<double>::quiet_NaN());
}

/// In double, without dimensions, on the device of the first part. Without gradients it is 0.
at::Tensor total_norm(std::vector<NormPart> parts, const Norm& norm, const char* caller) {
  const auto device = parts.empty() ? c10::Device(at::kCPU) : parts.front().device;
  const bool has_any = std::ranges::any_of(parts, [](const NormPart& part) {
    return std::ranges::any_of(part.gradients, [](const at::Tensor& gradient) { return gradient.defined(); });
  });
  size_t depth = 0;
  for (auto& part : parts) {
    part.power = norm.local(part);
    depth = std::max(depth, part.groups.size());
  }
  // Parts cut over the most groups first: after their last one they are as cut as others, and join them. So
  // each group's all-reduce comes once for all, in one order on all ranks.
  for (; depth > 0; --depth)
    for (size_t i = 0; i < parts.size(); ++i) {
      if (parts[i].groups.size() != depth) continue;
      auto groups = parts[i].groups;
      const auto power = over_ranks(parts[i], norm, caller);
      groups.pop_back();
      auto& joined = part_of(parts, groups, power.device());
      joined.power = norm.added(joined.power, power.to(joined.device));
    }
  at::Tensor total;
  for (const auto& part : parts)
    if (part.groups.empty()) total = norm.added(total, part.power.to(device));
  if (!has_any || !total.defined()) return at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(device));
  return norm.finished(total);
}

void check_norm_type(double norm_type, const char* caller) {
  require(!std::isnan(norm_type), "{}: expected norm_type to be a number or an infinity, found {}", caller, norm_type);
}

}  // namespace

double get_total_norm(const std::vector<at::Tensor>& parameters, double norm_type) {
  check_norm_type(norm_type, "get_total_norm");
  BelowResidency below;
  const auto parts = split_by_group(parameters, "get_total_norm", splits_shards_for(norm_type));
  return total_norm(parts, {norm_type, ZeroNorm::kDefined}, "get_total_norm").item<double>();
}

at::Tensor clip_grad_norm_on_device(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type,
                                    bool error_if_nonfinite, ZeroNorm zero) {
  check_norm_type(norm_type, "clip_grad_norm_");
  require(max_norm >= 0, "clip_grad_norm_: expected max_norm of 0 or more, found {}", max_norm);
  BelowResidency below;
  const auto parts = split_by_group(parameters, "clip_grad_norm_", splits_shards_for(norm_type));
  const auto norm = total_norm(parts, {norm_type, zero}, "clip_grad_norm_");
  if (error_if_nonfinite) {
    const double value = norm.item<double>();
    require_state(std::isfinite(value),
                  "clip_grad_norm_: the total norm of the gradients is {}; they were not changed. Set error_if_nonfinite to "
                  "false to scale them by it anyway", value);
  }
  // As torch.nn.utils.clip_grad_norm_: the small constant keeps a zero norm from dividing.
  // A norm that is not a number makes all gradients so, on every rank.
  const auto scale = (max_norm / (norm + 1e-6)).clamp_max(1.0);
  // Where it is known at once, a pass over the gradients that would change nothing is saved.
  if (scale.is_cpu() && scale.item<double>() >= 1.0) return norm;
  for (const auto& part : parts)
    for (auto gradient : part.gradients)
      if (gradient.defined()) gradient.mul_(scale.to(gradient.device()));
  return norm;
}

double clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type,
                       bool error_if_nonfinite) {
  return clip_grad_norm_on_device(parameters, max_norm, norm_type, error_if_nonfinite, ZeroNorm::kDefined).item<double>();
}

at::Tensor clip_grad_norm_async_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type) {
  return clip_grad_norm_on_device(parameters, max_norm, norm_type, /*error_if_nonfinite=*/false, ZeroNorm::kDefined);
}

}  // namespace fsdp
