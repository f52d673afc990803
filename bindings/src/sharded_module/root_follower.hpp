#pragma once

#include <memory>
#include <vector>

#include "module/state/module_state.hpp"
#include "root/step_hooks.hpp"

namespace fsdp::python {

class ShardedModule;

/// A root's modules, itself and all below, whose parameters follow its steps.
class RootFollower final : public StepHooks {
 public:
  explicit RootFollower(ModuleState& root);

  /// Calls `visit` with each that is still there.
  template <class Visit>
  void visit(const Visit& visit) const {
    for (const auto& weak : modules_)
      if (const auto module = weak.lock()) visit(*module);
  }

  // --- StepHooks: called without the interpreter's lock
  void take_over() override;
  void show() override;

 private:
  /// What users have put in the place of parameters and modules.
  void take_changes() const;

  std::vector<std::weak_ptr<ShardedModule>> modules_;
};

}  // namespace fsdp::python
