#pragma once

#include <optional>
#include <vector>

#include "group/group_options.hpp"
#include "group/group_parts.hpp"

namespace fsdp {

/// In which dtypes a group's gradients arrive, are reduced and are kept: what the policy and the reduction say, and what
/// `grad_dtype` says of one parameter.
class GradientDtypes {
 public:
  /// Both outlive this.
  GradientDtypes(GroupParts& parts, const ReduceOptions& reduction) : parts_(parts), reduction_(reduction) {}

  /// From what the policy, the reduction and the parameters say now.
  void plan();

  /// What the gradients of parameter `index` are added up in. gradient: the dtype of one that is there, which counts
  /// where any is taken.
  at::ScalarType reduce_dtype(size_t index, const std::optional<at::ScalarType>& gradient = {}) const;
  /// Its gradients are reduced in whatever dtype autograd makes.
  bool takes_any(size_t index) const;
  /// Those of one of its parameters are.
  bool takes_any() const { return takes_any_; }
  /// All gradients that are reduced together are in the dtype that theirs promote to.
  bool promotes() const;
  /// That a reduced gradient has on the sharded parameter; none: the one that it was reduced in.
  std::optional<at::ScalarType> kept_dtype(size_t index) const;

 private:
  std::optional<at::ScalarType> own_reduce_dtype(size_t index) const;

  GroupParts& parts_;
  const ReduceOptions& reduction_;
  std::vector<at::ScalarType> reduce_dtypes_;  // by parameter
  bool takes_any_ = false;
};

}  // namespace fsdp
