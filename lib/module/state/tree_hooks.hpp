#pragma once

#include <memory>
#include <vector>

#include "root/module_pass.hpp"
#include "root/step_hooks.hpp"

namespace fsdp {

class ModuleState;

/// What the module tree has to do around its root's steps, and what the modules of its passes are to show.
class TreeHooks final : public StepHooks {
 public:
  /// root: of the tree, whose passes are these from now on.
  explicit TreeHooks(ModuleState& root);

  void follow_modes() override;
  void check_mode(const ParamGroup& group) override;
  void check_modules() override;
  void take_over() override;
  void show(ShowsEvent event) override;
  void show_for_hook(const ParamGroup& group) override;
  void begin() override;
  size_t give_up_forwards() override;

 private:
  /// Calls `visit` with each that has a view, and that view.
  template <class Visit>
  void with_views(const Visit& visit) const;

  std::weak_ptr<ModuleState> root_;
  bool has_modes_ = false;  ///< a group's dtype depends on its modules' mode
  std::vector<std::weak_ptr<ModulePass>> passes_;
};

}  // namespace fsdp
