#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/borrowed_group.hpp"
#include "fsdp/error.hpp"
#include "fsdp/report.hpp"
#include "fsdp/statistics.hpp"
#include "fully_shard.hpp"

// What the package's Python files use. They hold the public names, signatures and docstrings.
namespace fsdp::python {

namespace {

using NoLock = py::call_guard<py::gil_scoped_release>;

Recurse recurse_of(bool value) { return value ? Recurse::kYes : Recurse::kNo; }

std::vector<FSDPModule> controls_of(const std::vector<std::shared_ptr<ShardedModule>>& modules) {
  std::vector<FSDPModule> controls;
  for (const auto& module : modules) controls.push_back(module->controls());
  return controls;
}

/// One of FSDPModule's controls of one value.
template <auto Control>
auto control() {
  return [](ShardedModule& module, bool value) {
    py::gil_scoped_release no_gil;
    (module.controls().*Control)(value);
  };
}

/// One that goes down the tree, or not.
template <auto Control>
auto recursive_control() {
  return [](ShardedModule& module, bool value, bool recurse) {
    py::gil_scoped_release no_gil;
    (module.controls().*Control)(value, recurse_of(recurse));
  };
}

void define_errors(py::module_& module) {
  static py::exception<Error> error(module, "Error", PyExc_RuntimeError);
  static py::exception<CommError> comm_error(module, "CommError", error.ptr());
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (const UsageError& e) {
      PyErr_SetString(PyExc_ValueError, e.what());
    } catch (const CommError& e) {
      PyErr_SetString(comm_error.ptr(), e.what());
    } catch (const Error& e) {
      PyErr_SetString(error.ptr(), e.what());
    }
  });
}

void define_communication(py::module_& module) {
  py::class_<Communicator, std::shared_ptr<Communicator>>(module, "Communicator");
  py::class_<DeviceMesh>(module, "DeviceMesh").def("__repr__", &DeviceMesh::to_string);
  module.def(
      "borrowed_group",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::vector<int> ranks, const std::string& device_type,
         double timeout_s) {
        return borrowed_group(group, {.world_ranks = std::move(ranks),
                                      .device_type = c10::Device(device_type).type(),
                                      .timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000))});
      },
      NoLock());
  module.def("mesh_from_groups", &mesh_from_groups, NoLock());
}

void define_controls(py::class_<ShardedModule, std::shared_ptr<ShardedModule>>& module) {
  module.def("set_requires_gradient_sync", recursive_control<&FSDPModule::set_requires_gradient_sync>())
      .def("set_requires_all_reduce", recursive_control<&FSDPModule::set_requires_all_reduce>())
      .def("set_reshard_after_backward", recursive_control<&FSDPModule::set_reshard_after_backward>())
      .def("set_keep_unsharded_storage", recursive_control<&FSDPModule::set_keep_unsharded_storage>())
      .def("set_separate_reduce_scatter_group", recursive_control<&FSDPModule::set_separate_reduce_scatter_group>())
      .def("set_is_last_backward", control<&FSDPModule::set_is_last_backward>())
      .def("set_manual_backward_finalization", control<&FSDPModule::set_manual_backward_finalization>())
      .def("set_force_sum_reduction_for_comms", control<&FSDPModule::set_force_sum_reduction_for_comms>())
      .def("set_unshard_in_backward", control<&FSDPModule::set_unshard_in_backward>())
      .def("set_reduce_scatter_unused_params", control<&FSDPModule::set_reduce_scatter_unused_params>())
      .def("set_gradient_divide_factor",
           [](ShardedModule& self, double factor) { self.controls().set_gradient_divide_factor(factor); })
      .def("set_reshard_after_forward",
           [](ShardedModule& self, const std::variant<bool, int64_t>& value, bool recurse) {
             py::gil_scoped_release no_gil;
             const auto request = std::visit([](auto v) { return ReshardAfterForward(v); }, value);
             self.controls().set_reshard_after_forward(request, recurse_of(recurse));
           })
      .def("set_reduce_scatter_max_input_buffers",
           [](ShardedModule& self, int buffers, bool recurse) {
             self.controls().set_reduce_scatter_max_input_buffers(buffers, recurse_of(recurse));
           })
      .def("set_allocate_memory_from_process_group_for_comm",
           [](ShardedModule& self, bool enable) {
             self.controls().set_allocate_memory_from_process_group_for_comm(enable);
           })
      .def("set_symm_mem_for_comm",
           [](ShardedModule& self, const std::string& backend) { self.controls().set_symm_mem_for_comm(backend); })
      .def("set_modules_to_forward_prefetch",
           [](ShardedModule& self, const std::vector<std::shared_ptr<ShardedModule>>& modules) {
             self.controls().set_modules_to_forward_prefetch(controls_of(modules));
           })
      .def("set_modules_to_backward_prefetch",
           [](ShardedModule& self, const std::vector<std::shared_ptr<ShardedModule>>& modules) {
             self.controls().set_modules_to_backward_prefetch(controls_of(modules));
           })
      .def("set_prefetch_distance",
           [](ShardedModule& self, int groups) { self.controls().set_prefetch_distance(groups); })
      .def("set_unsharded_byte_budget",
           [](ShardedModule& self, std::optional<int64_t> bytes) { self.controls().set_unsharded_byte_budget(bytes); })
      .def("finalize_backward", [](ShardedModule& self) {
        py::gil_scoped_release no_gil;
        self.controls().finalize_backward();
      })
      .def("finalize_backward_async", [](ShardedModule& self) {
        py::gil_scoped_release no_gil;
        return self.controls().finalize_backward_async();
      });
}

void define_statistics(py::class_<ShardedModule, std::shared_ptr<ShardedModule>>& module) {
  module.def("is_root", [](const ShardedModule& self) { return self.controls().is_root(); })
      .def("is_unsharded", [](const ShardedModule& self) { return self.controls().is_unsharded(); })
      .def("name", [](const ShardedModule& self) { return self.controls().name(); })
      .def("report", [](const ShardedModule& self) { return self.controls().report().to_string(); })
      .def("statistics", [](const ShardedModule& self) {
        const auto all = statistics(self.controls());
        py::dict found;
        found["all_gathers"] = all.all_gathers;
        found["gathered_bytes"] = all.gathered_bytes;
        found["reductions"] = all.reductions;
        found["reduced_bytes"] = all.reduced_bytes;
        found["communicated_bytes"] = all.communicated_bytes;
        return found;
      });
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  define_errors(module);
  define_communication(module);
  py::class_<Mirror, std::shared_ptr<Mirror>>(module, "Mirror");
  py::class_<GradientReductionHandle>(module, "GradientReductionHandle")
      .def("wait", &GradientReductionHandle::wait, NoLock());
  py::class_<ShardedModule, std::shared_ptr<ShardedModule>> sharded(module, "ShardedModule");
  sharded.def("pre_forward", &ShardedModule::pre_forward)
      .def("post_forward", &ShardedModule::post_forward)
      .def("unshard", &ShardedModule::unshard)
      .def("unshard_done", &ShardedModule::unshard_done)
      .def("reshard", &ShardedModule::reshard)
      .def("reset_iter_state", &ShardedModule::reset_iter_state)
      .def("applied", &ShardedModule::applied)
      .def("parameters", [](const ShardedModule& self) {
        py::list all;
        for (const auto& param : self.params()) all.append(param->sharded());
        return all;
      });
  define_controls(sharded);
  define_statistics(sharded);
  module.def("fully_shard", &shard);
  module.def("share_comm_ctx", [](const std::vector<std::shared_ptr<ShardedModule>>& roots) {
    share_comm_ctx(controls_of(roots));
  });
  module.def("set_python_side", [](py::object make_parameter, py::object make_gradient, py::object mirrors,
                                   py::object is_left_out, py::object placements) {
    python_side() = {{std::move(make_parameter), std::move(make_gradient)},
                     std::move(mirrors), std::move(is_left_out), std::move(placements)};
  });
  module.attr("torch_version") = FSDP_TORCH_VERSION;
}

}  // namespace fsdp::python
