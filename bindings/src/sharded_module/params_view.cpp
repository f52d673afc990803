#include "sharded_module/params_view.hpp"

#include "hooked/late_hooks.hpp"
#include "module/handles.hpp"
#include "module/state/module_state.hpp"
#include "sharded_module/added_modules.hpp"
#include "sharded_module/applied_params.hpp"

namespace fsdp::python {

ParamsView::ParamsView(FSDPModule controls, std::vector<std::shared_ptr<Mirror>> modules)
    : controls_(std::move(controls)), modules_(std::move(modules)) {}

Shows ParamsView::shows() const { return handles::state(controls_).pass()->shows(); }

void ParamsView::take_replaced() {
  if (params_.are_replaced()) take_over_replaced(handles::state(controls_).live_groups(), params_, shows());
}

void ParamsView::begin() {
  if (has_begun_ || shows() != Shows::kSharded) return take_replaced();
  if (params_.are_replaced() && is_in_functional_call()) return;
  take_over_changed(handles::state(controls_).live_groups(), params_);
  take_late_hooks(params_);
  has_begun_ = true;
}

void ParamsView::take_changes() {
  if (handles::state(controls_).tree().is_root())
    for (const auto& module : modules_) check_added_modules(*module);
  take_replaced();
}

}  // namespace fsdp::python
