#include "sharded_module/root_follower.hpp"

#include <torch/csrc/autograd/graph_task.h>

#include "module/handles.hpp"
#include "sharded_module/added_modules.hpp"
#include "sharded_module/applied_params.hpp"
#include "sharded_module/sharded_module.hpp"

namespace fsdp::python {

RootFollower::RootFollower(ModuleState& root) {
  root.visit([&](ModuleState& state) {
    if (auto module = ShardedModule::of(state)) modules_.push_back(module);
  });
}

void RootFollower::take_over() {
  py::gil_scoped_acquire gil;
  // A backward is of the parameters that its forward had.
  if (torch::autograd::get_current_graph_task_id() == -1) take_changes();
  visit([](ShardedModule& module) { module.params().take_over(); });
}

void RootFollower::take_changes() const {
  if (const auto root = modules_.empty() ? nullptr : modules_.front().lock())
    for (const auto& mirror : root->modules()) check_added_modules(*mirror);
  visit([](ShardedModule& module) {
    if (module.params().are_replaced())
      take_over_replaced(handles::state(module.controls()).live_groups(), module.params());
  });
}

void RootFollower::show() {
  py::gil_scoped_acquire gil;
  visit([](ShardedModule& module) { module.show_what_is_kept(); });
}

}  // namespace fsdp::python
