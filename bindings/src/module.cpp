#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "api/shard/shard_like.hpp"
#include "base/wording.hpp"
#include "checkpoints.hpp"
#include "comm/c10d/borrowed_group.hpp"
#include "copy_sharded.hpp"
#include "dispatch/host_error.hpp"
#include "dispatch/host_lock.hpp"
#include "dispatch/residency.hpp"
#include "extension/python_extension.hpp"
#include "fsdp/checkpoint_parts.hpp"
#include "fsdp/error.hpp"
#include "fsdp/schedule_check.hpp"
#include "fully_shard.hpp"
#include "init/python_init_run.hpp"
#include "inspect.hpp"
#include "local_shards.hpp"
#include "mesh/mesh_init.hpp"
#include "module/handles.hpp"
#include "python_words.hpp"
#include "sharded_module/controls.hpp"
#include "shown/set_data.hpp"
#include "whole/full_parameters.hpp"

// What the package's Python files use. They hold the public names, signatures and docstrings.
namespace fsdp::python {

namespace {

/// The core takes its own locks, and waits for other ranks: never under the interpreter's.
using NoLock = py::call_guard<py::gil_scoped_release>;
using Self = ShardedModule;

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

/// The tensor itself, or, of a parameter or a view of one, an empty tensor of its kind that is none.
py::object plain_like(const py::object& tensor) {
  const auto held = tensor_of(tensor);  // TypeError for what is none
  if (!held.defined()) return tensor;
  const auto keys = held.key_set();
  if (!keys.has_any(c10::DispatchKeySet({kResidencyKey, kInnerResidencyKey}))) return tensor;
  const BelowResidency below;
  return py::cast(at::empty({0}, at::TensorOptions().dtype(held.dtype()).device(held.device())));
}

/// Raises it in Python, with what failed as attributes.
void raise_comm_error(const py::object& type, const CommError& error) {
  const auto raised = type(error.what());
  const FailedOperation& failed = error.failed();
  raised.attr("operation") = failed.operation;
  raised.attr("subject") = failed.subject;
  raised.attr("group") = failed.group;
  raised.attr("rank") = failed.rank;
  raised.attr("size") = failed.size;
  if (const auto* disagreement = dynamic_cast<const ScheduleError*>(&error)) {
    raised.attr("collective") = disagreement->difference().collective;
    raised.attr("launched") = disagreement->difference().launched;
  }
  PyErr_SetObject(type.ptr(), raised.ptr());
}

void define_errors(py::module_& module) {
  set_wording(&in_python_words);
  module.def("in_python_words", &in_python_words);  // for the tests
  static py::exception<Error> error(module, "Error", PyExc_RuntimeError);
  static py::exception<CommError> comm_error(module, "CommError", error.ptr());
  static py::exception<ScheduleError> schedule_error(module, "ScheduleError", comm_error.ptr());
  // Of those that a program makes itself.
  for (const char* field : {"operation", "subject", "group"}) comm_error.attr(field) = "";
  comm_error.attr("rank") = -1;
  comm_error.attr("size") = 0;
  schedule_error.attr("collective") = py::none();
  schedule_error.attr("launched") = py::dict();
  static py::exception<CheckpointError> checkpoint_error(module, "CheckpointError", error.ptr());
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (const UsageError& e) {
      PyErr_SetString(PyExc_ValueError, e.what());
    } catch (const ScheduleError& e) {
      raise_comm_error(schedule_error, e);
    } catch (const CommError& e) {
      raise_comm_error(comm_error, e);
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
  module.def("ranks_per_node",
             [](const std::shared_ptr<Communicator>& world) {
               return ranks_per_node(*present(world, "a communicator"), launch_environment());
             },
             NoLock());
}

/// DTensors compute with the interpreter's lock, and an operator may have to wait for a gather.
void give_up_interpreter_lock() {
  static const HostLock lock = {
      .release = [] { return has_interpreter_lock() ? static_cast<void*>(PyEval_SaveThread()) : nullptr; },
      .acquire = [](void* thread) { PyEval_RestoreThread(static_cast<PyThreadState*>(thread)); },
      .ensure = [] { return static_cast<void*>(new py::gil_scoped_acquire); },
      .let_go = [](void* taken) { delete static_cast<py::gil_scoped_acquire*>(taken); },
  };
  set_host_lock(&lock);
  set_keep_host_error([](const std::exception& error) {
    auto* raised = const_cast<python_error*>(dynamic_cast<const python_error*>(&error));
    if (raised == nullptr) return;
    const InterpreterLock held;
    if (raised->type == nullptr) raised->persist();
  });
}

/// Inside FullParameters there is nothing to take over: what the module shows is no sharded parameter.
void end_apply(Self& self, const py::object& function, const py::object& of) {
  if (std::ranges::none_of(self.params().all(), [](const auto& param) { return param->forms().is_full(); }))
    self.apply().end(handles::state(self.controls()).live_groups(), self.params(), function, of);
}

/// Of each parameter: (its DTensor, the unsharded parameter).
std::vector<std::pair<py::object, py::object>> forms_of(Self& self) {
  std::vector<std::pair<py::object, py::object>> forms;
  for (const auto& param : self.params().all())
    forms.emplace_back(param->sharded().object(), param->forms().unsharded().object());
  return forms;
}

void check_schedule(Self& self, bool is_enabled, std::optional<std::chrono::milliseconds> late_after,
                    std::optional<std::chrono::milliseconds> compare_after, std::optional<bool> before_every_collective) {
  set_schedule_check(self.controls(), {.is_enabled = is_enabled,
                                       .late_after = late_after,
                                       .compare_after = compare_after,
                                       .before_every_collective = before_every_collective});
}

/// What the package's hooks call.
void define_hooks(PySharded& module) {
  module.def("pre_forward", &Self::pre_forward)
      .def("post_forward", &Self::post_forward)
      .def("unshard", &Self::unshard)
      .def("unshard_done", &Self::unshard_done)
      .def("reshard", &Self::reshard)
      .def("reset_iter_state", &Self::reset_iter_state)
      .def("before_apply", &Self::before_apply)
      .def("applied", &end_apply, py::arg("function") = py::none(), py::arg("of") = py::none())
      .def("apply_failed", [](Self& self) { self.apply().give_up(self.params()); })
      .def("set_find_hooked", [](Self& self, py::object find) { self.params().set_find_hooked(std::move(find)); })
      .def("set_post_optim_event", &Self::set_post_optim_event)
      .def("set_post_forward_mesh", [](Self& self, py::object mesh, int rank, int ranks) {
        self.set_post_forward_mesh({PyRef(std::move(mesh)), rank, ranks});
      });
}

/// What tells of a module, and changes nothing.
void define_views(PySharded& module) {
  module.def("group_count", [](Self& self) { return handles::state(self.controls()).live_groups().size(); })
      .def("replicates", [](Self& self) { return handles::state(self.controls()).request().mesh_info.replicate_size() > 1; })
      .def("see_places", [](Self& self) { self.before_use(ParamUser::Use::kAll); })
      .def("forms", &forms_of)
      .def("check_copyable",
           [](const Self& self) {
             for (const auto& unit : self.modules()) check_copyable(*unit);
           });
}

void define_modules(py::module_& module) {
  py::class_<Mirror, std::shared_ptr<Mirror>> mirror(module, "Mirror");
  not_made_by_python(mirror);
  py::class_<GradientReductionHandle> reduction(module, "GradientReduction");
  not_made_by_python(reduction).def("wait", &GradientReductionHandle::wait, NoLock());
  PySharded sharded(module, "ShardedModule");
  not_made_by_python(sharded);
  define_hooks(sharded);
  define_controls(sharded);
  sharded.def("set_schedule_check", &check_schedule, NoLock());
  define_views(sharded);
  define_inspection(module, sharded);
  module.def("fully_shard", &shard);
  module.def("copy_sharded", &copy_sharded);
  module.def("local_shards", &local_shards);
  module.def("clip_grad_norm_", &clip_grad_norm);
  module.def("share_comm_ctx", [](const Modules& roots) { share_comm_ctx(controls_of(roots)); }, NoLock());
}

void set_python_side(const py::dict& side) {
  python_side() = {.dtensors = {side["dtensor"], side["dtensor"].attr("__new__"), side["in_dtype"], side["make_unsharded"],
                                side["make_post_forward"], side["local_gradient"], side["replicates_ordinary"]},
                   .mirrors = side["mirrors"],
                   .local_tensors = side["local_tensors"],
                   .stand_in = side["stand_in"],
                   .is_in_functional_call = side["is_in_functional_call"]};
  take_over_set_data();
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  give_up_interpreter_lock();
  define_errors(module);
  define_communication(module);
  define_modules(module);
  define_checkpoints(module);
  define_extensions(module);
  define_full_parameters(module);
  define_init(module);
  module.def("plain_like", &plain_like);
  module.def("dtensor_like", [](const at::Tensor& local, const py::object& like) {
    return dtensor_like(python_side().dtensors, local, like);
  });
  module.def("set_python_side", &set_python_side);
}

}  // namespace fsdp::python
