#include "sharded_module/controls.hpp"

#include <pybind11/functional.h>

#include <algorithm>
#include <variant>

#include "api/shard/controlled_groups.hpp"
#include "base/require.hpp"
#include "custom_comms.hpp"
#include "module/handles.hpp"

namespace fsdp::python {

namespace {

/// The core takes its own locks, and waits for other ranks: never under the interpreter's.
using WithoutLock = py::call_guard<py::gil_scoped_release>;
using Controlled = ShardedModule;

Recurse recurse_of(bool value) { return value ? Recurse::kYes : Recurse::kNo; }

/// One that takes what Python gives.
template <class Value>
auto control(void (FSDPModule::*function)(Value)) {
  return [function](Controlled& self, Value value) { (self.controls().*function)(value); };
}

/// One that goes down the tree, or not.
template <class Value>
auto recursive(void (FSDPModule::*function)(Value, Recurse)) {
  return [function](Controlled& self, Value value, bool recurse) {
    (self.controls().*function)(value, recurse_of(recurse));
  };
}

/// One that is told of other modules.
auto with_modules(void (FSDPModule::*function)(const std::vector<FSDPModule>&)) {
  return [function](Controlled& self, const Modules& modules) { (self.controls().*function)(controls_of(modules)); };
}

ReduceScatterStart start_named(const std::string& name) {
  const auto found = std::find_if(kReduceScatterStarts.begin(), kReduceScatterStarts.end(),
                                  [&](ReduceScatterStart start) { return name == name_of(start); });
  require(found != kReduceScatterStarts.end(),
          "set_reduce_scatter_start: expected \"by_size\", \"first_after_all_gather\" or \"first_after_next_backward\", "
          "found \"{}\"",
          name);
  return *found;
}

/// Before the first forward FSDP2 has nothing to finalize, whatever module and mode it is asked for.
bool has_begun(Controlled& self) { return handles::state(self.controls()).context()->has_started(); }

/// These take the places of the buffers that the policy keeps in another dtype.
void cast_buffers(Controlled& self, const std::vector<at::Tensor>& buffers) {
  auto& precision = handles::state(self.controls()).precision();
  precision.set_cast_buffers({});
  for (const auto& buffer : buffers) precision.move_buffers({buffer}, buffer.device());
}

/// What a module is and has, rather than what its root does.
void define_modules_own(PySharded& module) {
  module.def("cast_buffers", &cast_buffers).def("is_root", [](Controlled& self) { return self.controls().is_root(); });
}

/// When parameters are gathered, and how long they stay.
void define_residency_controls(PySharded& module) {
  module.def("set_reshard_after_backward", recursive(&FSDPModule::set_reshard_after_backward), WithoutLock())
      .def("set_keep_unsharded_storage", recursive(&FSDPModule::set_keep_unsharded_storage), WithoutLock())
      .def("set_unshard_in_backward", control(&FSDPModule::set_unshard_in_backward), WithoutLock())
      .def("set_modules_to_forward_prefetch", with_modules(&FSDPModule::set_modules_to_forward_prefetch), WithoutLock())
      .def("set_modules_to_backward_prefetch", with_modules(&FSDPModule::set_modules_to_backward_prefetch), WithoutLock())
      .def("set_prefetch_distance", control(&FSDPModule::set_prefetch_distance), WithoutLock())
      .def("set_unsharded_byte_budget", control(&FSDPModule::set_unsharded_byte_budget), WithoutLock())
      .def("set_reshard_after_forward",
           [](Controlled& self, const std::variant<bool, int64_t>& value, bool recurse) {
             const auto request = std::visit([](auto v) { return ReshardAfterForward(v); }, value);
             self.controls().set_reshard_after_forward(request, recurse_of(recurse));
           },
           WithoutLock());
}

/// Which backwards reduce, and when that is over.
void define_backward_controls(PySharded& module) {
  module.def("set_requires_gradient_sync", recursive(&FSDPModule::set_requires_gradient_sync), WithoutLock())
      .def("set_requires_all_reduce", recursive(&FSDPModule::set_requires_all_reduce), WithoutLock())
      .def("set_is_last_backward", control(&FSDPModule::set_is_last_backward), WithoutLock())
      .def("set_manual_backward_finalization", control(&FSDPModule::set_manual_backward_finalization), WithoutLock())
      .def("finalize_backward",
           [](Controlled& self) {
             if (has_begun(self)) self.controls().finalize_backward();
           },
           WithoutLock())
      .def("finalize_backward_async",
           [](Controlled& self) {
             return has_begun(self) ? self.controls().finalize_backward_async() : GradientReductionHandle();
           },
           WithoutLock());
}

/// What a reduction does with gradients.
void define_reduction_controls(PySharded& module) {
  module.def("set_force_sum_reduction_for_comms",
             [](Controlled& self, bool value) {
               set_force_sum_reduction_for_comms(handles::state(self.controls()), value, Recurse::kNo);
             },
             WithoutLock())
      .def("set_reduce_scatter_unused_params",
           [](Controlled& self, bool value, bool recurse) {
             set_reduce_scatter_unused_params(handles::state(self.controls()), value, recurse_of(recurse));
           },
           WithoutLock())
      .def("set_gradient_divide_factor",
           [](Controlled& self, double factor) {
             set_gradient_divide_factor(handles::state(self.controls()), factor, Recurse::kNo);
           },
           WithoutLock());
}

/// When reduce-scatters begin, and how many live.
void define_reduce_scatter_controls(PySharded& module) {
  module.def("set_separate_reduce_scatter_group", recursive(&FSDPModule::set_separate_reduce_scatter_group), WithoutLock())
      .def("set_reduce_scatter_max_input_buffers", recursive(&FSDPModule::set_reduce_scatter_max_input_buffers),
           WithoutLock())
      .def("set_reduce_scatter_start",
           [](Controlled& self, const std::string& start) {
             self.controls().set_reduce_scatter_start(start_named(start));
           },
           WithoutLock())
      .def("choose_reduce_scatter_start",
           [](Controlled& self, const std::function<double()>& time_step, int rounds) {
             return name_of(self.controls().choose_reduce_scatter_start(time_step, rounds));
           },
           WithoutLock());
}

/// What collectives go through, and whose memory they use.
void define_collective_controls(PySharded& module) {
  module.def("set_custom_all_gather", &set_custom_all_gather)
      .def("set_custom_reduce_scatter", &set_custom_reduce_scatter)
      .def("set_all_reduce_hook", &set_all_reduce_hook)
      .def("group_comms", &group_comms)
      .def("set_allocate_memory_from_process_group_for_comm",
           [](Controlled& self, bool enable) {
             self.controls().set_allocate_memory_from_process_group_for_comm(enable);
           },
           WithoutLock());
}

}  // namespace

std::vector<FSDPModule> controls_of(const Modules& modules) {
  std::vector<FSDPModule> controls;
  for (const auto& module : modules) controls.push_back(present(module, "a sharded module")->controls());
  return controls;
}

void define_controls(PySharded& module) {
  define_modules_own(module);
  define_residency_controls(module);
  define_backward_controls(module);
  define_reduction_controls(module);
  define_reduce_scatter_controls(module);
  define_collective_controls(module);
}

}  // namespace fsdp::python
