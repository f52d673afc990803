#include <pybind11/functional.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>

#include "api/shard/controlled_groups.hpp"
#include "api/shard/shard_like.hpp"
#include "base/require.hpp"
#include "checkpoints.hpp"
#include "comm/c10d/borrowed_group.hpp"
#include "copy_sharded.hpp"
#include "custom_comms.hpp"
#include "dispatch/host_lock.hpp"
#include "dispatch/residency.hpp"
#include "fsdp/checkpoint_parts.hpp"
#include "fsdp/error.hpp"
#include "fsdp/report.hpp"
#include "fsdp/statistics.hpp"
#include "fully_shard.hpp"
#include "local_shards.hpp"
#include "mesh/mesh_init.hpp"
#include "sharded_module/applied_params.hpp"

// What the package's Python files use. They hold the public names, signatures and docstrings.
namespace fsdp::python {

namespace {

/// The core takes its own locks, and waits for other ranks: never under the interpreter's.
using NoLock = py::call_guard<py::gil_scoped_release>;
using Self = ShardedModule;
using Modules = std::vector<std::shared_ptr<ShardedModule>>;
using PySharded = py::class_<ShardedModule, std::shared_ptr<ShardedModule>>;

Recurse recurse_of(bool value) { return value ? Recurse::kYes : Recurse::kNo; }

ReduceScatterStart start_named(const std::string& name) {
  const auto found = std::find_if(kReduceScatterStarts.begin(), kReduceScatterStarts.end(),
                                  [&](ReduceScatterStart start) { return name == name_of(start); });
  require(found != kReduceScatterStarts.end(),
          "set_reduce_scatter_start: expected \"by_size\", \"first_after_all_gather\" or \"first_after_next_backward\", "
          "found \"{}\"",
          name);
  return *found;
}

std::vector<FSDPModule> controls_of(const Modules& modules) {
  std::vector<FSDPModule> controls;
  for (const auto& module : modules) controls.push_back(present(module, "a sharded module")->controls());
  return controls;
}

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

/// The Python function (world ranks, name) -> process group, called without the interpreter's lock.
auto group_maker(py::object function) {
  auto shared = std::make_shared<PyRef>(std::move(function));
  return [shared](const std::vector<int>& ranks, const std::string& name) {
    py::gil_scoped_acquire gil;
    return shared->object()(ranks, name).cast<ProcessGroupPtr>();
  };
}

std::shared_ptr<Communicator> borrow(const ProcessGroupPtr& group, std::vector<int> ranks,
                                     const std::string& device_type, double timeout_s, py::object new_group) {
  present(group, "a process group");
  BorrowedGroupOptions options{.world_ranks = std::move(ranks),
                               .device_type = c10::Device(device_type).type(),
                               .timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000)),
                               .new_group = group_maker(std::move(new_group))};
  py::gil_scoped_release no_gil;
  return borrowed_group(group, std::move(options));
}

DeviceMesh mesh_of(const std::vector<std::shared_ptr<Communicator>>& groups, const std::vector<std::string>& names) {
  for (const auto& group : groups) present(group, "a communicator");
  return mesh_of_groups(groups, names);
}

/// One of FSDPModule's controls of one value.
template <auto Control>
void control(ShardedModule& module, bool value) {
  (module.controls().*Control)(value);
}

/// One that goes down the tree, or not.
template <auto Control>
void recursive_control(ShardedModule& module, bool value, bool recurse) {
  (module.controls().*Control)(value, recurse_of(recurse));
}

/// The tensor itself, or, of a parameter or a view of one, an empty tensor of its kind that is none.
py::object plain_like(const py::object& tensor) {
  const auto held = tensor_of(tensor);  // TypeError for what is none
  if (!held.defined()) return tensor;
  const auto keys = held.key_set();
  if (!keys.has_any(c10::DispatchKeySet({kResidencyKey, kInnerResidencyKey}))) return tensor;
  const BelowResidency below;
  return py::cast(at::empty({0}, at::TensorOptions().dtype(held.dtype()).device(held.device())));
}

/// Before the first forward FSDP2 has nothing to finalize, whatever module and mode it is asked for.
bool has_begun(Self& self) { return self.controls().state().context->has_started(); }

void define_errors(py::module_& module) {
  static py::exception<Error> error(module, "Error", PyExc_RuntimeError);
  static py::exception<CommError> comm_error(module, "CommError", error.ptr());
  static py::exception<CheckpointError> checkpoint_error(module, "CheckpointError", error.ptr());
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (const UsageError& e) {
      PyErr_SetString(PyExc_ValueError, e.what());
    } catch (const CommError& e) {
      PyErr_SetString(comm_error.ptr(), e.what());
    } catch (const CheckpointError& e) {
      PyErr_SetString(checkpoint_error.ptr(), e.what());
    } catch (const Error& e) {
      PyErr_SetString(error.ptr(), e.what());
    }
  });
}

void define_communication(py::module_& module) {
  py::class_<Communicator, std::shared_ptr<Communicator>> communicator(module, "Communicator");
  not_made_by_python(communicator);
  py::class_<DeviceMesh> mesh(module, "DeviceMesh");
  not_made_by_python(mesh).def("submesh", &DeviceMesh::submesh).def("__repr__", &DeviceMesh::to_string);
  module.def("borrowed_group", &borrow);
  module.def("mesh_of_groups", &mesh_of, NoLock());
}

void define_controls(PySharded& module) {
  module.def("set_requires_gradient_sync", &recursive_control<&FSDPModule::set_requires_gradient_sync>, NoLock())
      .def("set_requires_all_reduce", &recursive_control<&FSDPModule::set_requires_all_reduce>, NoLock())
      .def("set_reshard_after_backward", &recursive_control<&FSDPModule::set_reshard_after_backward>, NoLock())
      .def("set_keep_unsharded_storage", &recursive_control<&FSDPModule::set_keep_unsharded_storage>, NoLock())
      .def("set_separate_reduce_scatter_group", &recursive_control<&FSDPModule::set_separate_reduce_scatter_group>, NoLock())
      .def("set_is_last_backward", &control<&FSDPModule::set_is_last_backward>, NoLock())
      .def("set_manual_backward_finalization", &control<&FSDPModule::set_manual_backward_finalization>, NoLock())
      .def("set_force_sum_reduction_for_comms",
           [](Self& self, bool value) {
             set_force_sum_reduction_for_comms(self.controls().state(), value, Recurse::kNo);
           },
           NoLock())
      .def("set_unshard_in_backward", &control<&FSDPModule::set_unshard_in_backward>, NoLock())
      .def("set_reduce_scatter_unused_params",
           [](Self& self, bool value, bool recurse) {
             set_reduce_scatter_unused_params(self.controls().state(), value, recurse_of(recurse));
           },
           NoLock())
      .def("set_gradient_divide_factor",
           [](Self& self, double factor) { set_gradient_divide_factor(self.controls().state(), factor, Recurse::kNo); },
           NoLock())
      .def("set_reshard_after_forward",
           [](Self& self, const std::variant<bool, int64_t>& value, bool recurse) {
             const auto request = std::visit([](auto v) { return ReshardAfterForward(v); }, value);
             self.controls().set_reshard_after_forward(request, recurse_of(recurse));
           },
           NoLock())
      .def("set_reduce_scatter_max_input_buffers",
           [](Self& self, int buffers, bool recurse) {
             self.controls().set_reduce_scatter_max_input_buffers(buffers, recurse_of(recurse));
           },
           NoLock())
      .def("set_allocate_memory_from_process_group_for_comm",
           [](Self& self, bool enable) { self.controls().set_allocate_memory_from_process_group_for_comm(enable); },
           NoLock())
      .def("set_symm_mem_for_comm",
           [](Self& self, const std::string& backend) { self.controls().set_symm_mem_for_comm(backend); }, NoLock())
      .def("set_modules_to_forward_prefetch",
           [](Self& self, const Modules& modules) {
             self.controls().set_modules_to_forward_prefetch(controls_of(modules));
           },
           NoLock())
      .def("set_modules_to_backward_prefetch",
           [](Self& self, const Modules& modules) {
             self.controls().set_modules_to_backward_prefetch(controls_of(modules));
           },
           NoLock())
      .def("set_prefetch_distance", [](Self& self, int groups) { self.controls().set_prefetch_distance(groups); },
           NoLock())
      .def("set_reduce_scatter_start",
           [](Self& self, const std::string& start) { self.controls().set_reduce_scatter_start(start_named(start)); },
           NoLock())
      .def("choose_reduce_scatter_start",
           [](Self& self, const std::function<double()>& time_step, int rounds) {
             return name_of(self.controls().choose_reduce_scatter_start(time_step, rounds));
           },
           NoLock())
      .def("set_unsharded_byte_budget",
           [](Self& self, std::optional<int64_t> bytes) { self.controls().set_unsharded_byte_budget(bytes); }, NoLock())
      .def("finalize_backward",
           [](Self& self) {
             if (has_begun(self)) self.controls().finalize_backward();
           },
           NoLock())
      .def("finalize_backward_async",
           [](Self& self) {
             return has_begun(self) ? self.controls().finalize_backward_async() : GradientReductionHandle();
           },
           NoLock());
}

void define_statistics(PySharded& module) {
  module.def("report", [](Self& self) { return self.controls().report().to_string(); }, NoLock())
      .def("statistics",
           [](Self& self) {
             const auto all = statistics(self.controls());
             return std::map<std::string, int64_t>{{"all_gathers", all.all_gathers},
                                                   {"gathered_bytes", all.gathered_bytes},
                                                   {"reductions", all.reductions},
                                                   {"reduced_bytes", all.reduced_bytes},
                                                   {"communicated_bytes", all.communicated_bytes}};
           },
           NoLock());
}

/// Of each parameter: (its DTensor, the unsharded parameter).
std::vector<std::pair<py::object, py::object>> forms_of(Self& self) {
  std::vector<std::pair<py::object, py::object>> forms;
  for (const auto& param : self.params().all())
    forms.emplace_back(param->sharded().object(), param->forms().unsharded().object());
  return forms;
}

/// DTensors compute with the interpreter's lock, and an operator may have to wait for a gather.
void give_up_interpreter_lock() {
  static const HostLock lock = {
      .release = [] { return PyGILState_Check() != 0 ? static_cast<void*>(PyEval_SaveThread()) : nullptr; },
      .acquire = [](void* thread) { PyEval_RestoreThread(static_cast<PyThreadState*>(thread)); },
  };
  set_host_lock(&lock);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  give_up_interpreter_lock();
  define_errors(module);
  define_communication(module);
  py::class_<Mirror, std::shared_ptr<Mirror>> mirror(module, "Mirror");
  not_made_by_python(mirror);
  py::class_<GradientReductionHandle> reduction(module, "GradientReduction");
  not_made_by_python(reduction).def("wait", &GradientReductionHandle::wait, NoLock());
  PySharded sharded(module, "ShardedModule");
  not_made_by_python(sharded).def("pre_forward", &ShardedModule::pre_forward)
      .def("post_forward", &ShardedModule::post_forward)
      .def("unshard", &ShardedModule::unshard)
      .def("unshard_done", &ShardedModule::unshard_done)
      .def("reshard", &ShardedModule::reshard)
      .def("reset_iter_state", &ShardedModule::reset_iter_state)
      .def("before_apply", [](Self& self) {
        self.reshard();
        prepare_apply(self.params());
      })
      .def("applied", [](Self& self) { take_over_applied(self.controls().state().live_groups(), self.params()); })
      .def("set_post_forward_mesh", [](ShardedModule& self, py::object mesh, int rank, int ranks) {
        self.params().set_post_forward_mesh({PyRef(std::move(mesh)), rank, ranks});
      });
  sharded.def("set_post_optim_event", &ShardedModule::set_post_optim_event)
      .def("set_custom_all_gather", &set_custom_all_gather)
      .def("set_custom_reduce_scatter", &set_custom_reduce_scatter)
      .def("set_all_reduce_hook", &set_all_reduce_hook)
      .def("group_count", [](Self& self) { return self.controls().state().live_groups().size(); })
      .def("replicates", [](Self& self) { return self.controls().state().mesh_info.replicate_size() > 1; });
  define_controls(sharded);
  define_statistics(sharded);
  sharded.def("forms", &forms_of);
  sharded.def("check_copyable", [](const ShardedModule& self) {
    for (const auto& unit : self.modules()) check_copyable(*unit);
  });
  module.def("plain_like", &plain_like);
  module.def("fully_shard", &shard);
  module.def("copy_sharded", &copy_sharded);
  module.def("local_shards", &local_shards);
  module.def("clip_grad_norm_", &clip_grad_norm);
  module.def("share_comm_ctx", [](const Modules& roots) { share_comm_ctx(controls_of(roots)); }, NoLock());
  define_checkpoints(module);
  module.def("set_python_side", [](const py::dict& side) {
    python_side() = {.dtensors = {side["make_gradient"], side["make_unsharded"], side["make_post_forward"],
                                  side["local_gradient"], side["replicates_ordinary"]},
                     .mirrors = side["mirrors"],
                     .is_left_out = side["is_left_out"],
                     .local_tensors = side["local_tensors"]};
  });
}

}  // namespace fsdp::python
