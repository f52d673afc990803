#include "sharded_module/root_follower.hpp"

#include "sharded_module/sharded_module.hpp"

namespace fsdp::python {

RootFollower::RootFollower(ModuleState& root) {
  root.visit([&](ModuleState& state) {
    if (auto module = ShardedModule::of(state)) modules_.push_back(module);
  });
}

void RootFollower::take_over() {
  py::gil_scoped_acquire gil;
  visit([](ShardedModule& module) { module.params().take_over(); });
}

void RootFollower::show() {
  py::gil_scoped_acquire gil;
  visit([](ShardedModule& module) { module.show_what_is_kept(); });
}

}  // namespace fsdp::python
