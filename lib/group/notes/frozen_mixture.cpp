#include "group/notes/frozen_mixture.hpp"

#include <fmt/ranges.h>

#include <set>

#include "comm/work.hpp"
#include "group/param_group.hpp"

namespace fsdp {

namespace {
/// True if the parameter needs a gradient. Of the two tensors that a user may have frozen since the last step the registered
/// one wins; the piece is never asked.
bool needs_gradient(const FSDPParam& param) {
  const auto unsharded_param = param.unsharded_param(), registered = param.sharded_param();
  if (!unsharded_param.defined() || !registered.defined()) return param.requires_grad();
  return registered.requires_grad() != param.requires_grad() ? registered.requires_grad() : unsharded_param.requires_grad();
}
}  // namespace

std::string listed(const std::vector<std::string>& names) {
  constexpr size_t kMost = 8;
  if (names.size() <= kMost) return fmt::format("{}", fmt::join(names, ", "));
  return fmt::format("{} and {} more", fmt::join(names.begin(), names.begin() + kMost, ", "), names.size() - kMost);
}

std::string FrozenMixture::to_string() const {
  return fmt::format("{} bytes are frozen ({}), {} bytes are trainable ({}); {} extra gradient bytes",
                     with_separators(frozen.bytes), listed(frozen.names), with_separators(trainable.bytes),
                     listed(trainable.names), with_separators(extra_gradient_bytes));
}

FrozenMixture mixture_of(const ParamGroup& group) {
  FrozenMixture mixture;
  const auto& params = group.params();
  std::set<size_t> reduced;  // segments
  for (size_t i = 0; i < params.size(); ++i) {
    if (params[i].has_moved_away) continue;
    const bool is_trainable = needs_gradient(params[i]);
    if (is_trainable) reduced.insert(group.parts().layout.segment_of(i));
    auto& part = is_trainable ? mixture.trainable : mixture.frozen;
    part.bytes += params[i].spec.unsharded_bytes();
    part.names.push_back(params[i].name());
  }
  for (size_t i = 0; i < params.size(); ++i)
    if (!params[i].has_moved_away && !needs_gradient(params[i]) && reduced.contains(group.parts().layout.segment_of(i)))
      mixture.extra_gradient_bytes +=
          params[i].layout().numel() * static_cast<int64_t>(c10::elementSize(group.gradients().dtypes.reduce_dtype(i)));
  return mixture;
}

}  // namespace fsdp
