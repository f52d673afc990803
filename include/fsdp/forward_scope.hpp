#pragma once

#include <utility>

#include "fsdp/fully_shard.hpp"

namespace fsdp {

/// A step without backward (eval, generation): inside it the learned order is prefetched and
/// groups are released as in forward; at its end everything it gathered is released.
/// With autograd recording, the backward that follows belongs to the same step.
class ForwardScope {
 public:
  explicit ForwardScope(const FSDPModule& root);
  ~ForwardScope();
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;

 private:
  std::shared_ptr<ModuleState> state_;
};

/// `auto scope = fsdp::forward_scope(root);`
[[nodiscard]] inline ForwardScope forward_scope(const FSDPModule& root) {
  return ForwardScope(root);
}

/// Runs `module->forward(inputs...)` inside a scope of its root.
template <class Holder, class... Inputs>
auto call(Holder&& module, Inputs&&... inputs) {
  auto found = find_fsdp_module(*module);
  if (!found) return module->forward(std::forward<Inputs>(inputs)...);
  ForwardScope scope(*found);
  return module->forward(std::forward<Inputs>(inputs)...);
}

}  // namespace fsdp
