#pragma once

#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "group/group_options.hpp"
#include "group/param_dtypes.hpp"

namespace fsdp {

/// In which dtypes a group's gradients arrive, are reduced and are kept: what the policy and the reduction say, and what
/// `grad_dtype` says of one parameter.
class GradientDtypes {
 public:
  /// Both outlive this.
  GradientDtypes(GroupParts& parts, const ReduceOptions& reduction) : parts_(parts), reduction_(reduction) {}

  /// In which dtype each parameter's gradients are reduced, and in which autograd leaves them on the unsharded parameter.
  struct Plan {
    std::vector<at::ScalarType> reduced;
    std::vector<GradDtype> of_unsharded;
  };
  /// What goes for parameters in these dtypes, from what the policy, the reduction and the parameters say now. leaving:
  /// parameters whose gradients count no more.
  Plan decide(const ParamDtypes& dtypes, std::span<const size_t> leaving) const;
  void set(Plan plan);
  /// Goes by the parameters as they are.
  void plan() { set(decide(dtypes_of(parts_), {})); }

  /// What the gradients of parameter `index` are added up in. gradient: the dtype of one that is there, which counts
  /// where any is taken.
  at::ScalarType reduce_dtype(size_t index, const std::optional<at::ScalarType>& gradient = {}) const;
  /// Its gradients are reduced in whatever dtype autograd makes.
  bool takes_any(size_t index) const;
  /// Returns whether that is so for one of the group's parameters at least, as of the last `set`.
  bool takes_any() const { return takes_any_; }
  /// All gradients that are reduced together are in the dtype that theirs promote to.
  bool promotes() const;
  /// Returns the dtype that a reduced gradient has on the sharded parameter; none: the one that it was reduced in.
  std::optional<at::ScalarType> kept_dtype(size_t index) const {
    const auto& param = parts_.params[index];
    return kept_dtype(param, param.spec.dtype);
  }
  /// Returns the same for a parameter that is kept in the dtype `stored`.
  std::optional<at::ScalarType> kept_dtype(const FSDPParam& param, at::ScalarType stored) const {
    if (param.grad_dtype().is_set) return param.grad_dtype().dtype;
    return parts_.config.mp_policy.keep_low_precision_grads ? std::nullopt : std::optional(stored);
  }

 private:
  std::optional<at::ScalarType> own_reduce_dtype(size_t index, const ParamDtypes& dtypes) const;

  GroupParts& parts_;
  const ReduceOptions& reduction_;
  std::vector<at::ScalarType> reduce_dtypes_;  // by parameter
  bool takes_any_ = false;
};

}  // namespace fsdp
