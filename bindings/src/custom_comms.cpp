#include "custom_comms.hpp"

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "fsdp/all_reduce_hook.hpp"
#include "fsdp/custom_comm.hpp"
#include "module/handles.hpp"

namespace fsdp::python {

namespace {

/// A dist.Work that a Python object has returned.
class PythonWork final : public Work {
 public:
  explicit PythonWork(py::object work) : work_(std::move(work)) {}

  void wait() override {
    if (is_waited_for_) return;
    py::gil_scoped_acquire gil;
    work_.object().attr("wait")();
    is_waited_for_ = true;
  }
  bool is_completed() override {
    py::gil_scoped_acquire gil;
    return is_waited_for_ || work_.object().attr("is_completed")().cast<bool>();
  }

 private:
  PyRef work_;
  bool is_waited_for_ = false;
};

std::shared_ptr<Work> work_of(py::object returned) {
  return returned.is_none() ? nullptr : std::make_shared<PythonWork>(std::move(returned));
}

/// What both interfaces have in common: who allocates, and over which process group.
class PythonComm {
 public:
  PythonComm(py::object comm, py::object process_group)
      : comm_(std::move(comm)), process_group_(std::move(process_group)) {}

  py::object object() const { return comm_.object(); }
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) const {
    py::gil_scoped_acquire gil;
    using namespace py::literals;
    return tensor_of(comm_.object().attr("allocate")(
        py::make_tuple(numel), "dtype"_a = py::cast(c10::typeMetaToScalarType(options.dtype())),
        "device"_a = py::cast(options.device())));
  }
  template <class... Args>
  std::shared_ptr<Work> start(const at::Tensor& output, const at::Tensor& input, Communicator& group,
                              Args&&... args) const {
    py::gil_scoped_acquire gil;
    using namespace py::literals;
    return work_of(comm_.object()("output_tensor"_a = output, "input_tensor"_a = input,
                                  "group"_a = process_group_.object()(group.ranks()), "async_op"_a = true,
                                  std::forward<Args>(args)...));
  }

 private:
  PyRef comm_, process_group_;
};

class PythonAllGather final : public AllGatherComm {
 public:
  PythonAllGather(py::object comm, py::object process_group) : comm_(std::move(comm), std::move(process_group)) {}
  py::object object() const { return comm_.object(); }
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override {
    return comm_.allocate(numel, options);
  }
  std::shared_ptr<Work> start_all_gather(const at::Tensor& output, const at::Tensor& input, Communicator& group,
                                         std::string_view) override {
    return comm_.start(output, input, group);
  }

 private:
  PythonComm comm_;
};

class PythonReduceScatter final : public ReduceScatterComm {
 public:
  PythonReduceScatter(py::object comm, py::object process_group)
      : comm_(std::move(comm), std::move(process_group)) {}
  py::object object() const { return comm_.object(); }
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override {
    return comm_.allocate(numel, options);
  }
  std::shared_ptr<Work> start_reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp,
                                             Communicator& group, std::string_view) override {
    py::gil_scoped_acquire gil;
    using namespace py::literals;
    // Gradients are summed, and divided outside the collective.
    return comm_.start(output, input, group, "op"_a = py::cast(c10d::ReduceOp(c10d::ReduceOp::SUM)));
  }

 private:
  PythonComm comm_;
};

template <class OfPython, class Comm>
py::object object_of(const std::shared_ptr<Comm>& comm) {
  if (!comm) return py::none();
  const auto* of_python = dynamic_cast<const OfPython*>(comm.get());
  return of_python != nullptr ? of_python->object() : py::str("memory from the process group");
}

/// What comes between a reduction and the user's hook on its result.
class HookedWork final : public Work {
 public:
  HookedWork(const AllReduceCall& call, std::shared_ptr<PyRef> hook)
      : gradients_(call.gradients), divide_factor_(call.divide_factor), hook_(std::move(hook)) {
    if (call.replicate_group != nullptr)
      reduction_ = call.replicate_group->start_all_reduce(gradients_, ReduceOp::kSum, call.subject);
  }

  void wait() override {
    if (is_done_) return;
    if (reduction_) reduction_->wait();
    if (divide_factor_ != 1) gradients_.div_(divide_factor_);
    py::gil_scoped_acquire gil;
    hook_->object()(gradients_);
    is_done_ = true;
  }
  bool is_completed() override { return is_done_ || !reduction_ || reduction_->is_completed(); }

 private:
  at::Tensor gradients_;
  double divide_factor_;
  std::shared_ptr<PyRef> hook_;
  std::shared_ptr<Work> reduction_;
  bool is_done_ = false;
};

}  // namespace

void set_custom_all_gather(ShardedModule& module, py::object comm, py::object process_group) {
  auto made = comm.is_none() ? nullptr : std::make_shared<PythonAllGather>(std::move(comm), std::move(process_group));
  py::gil_scoped_release no_gil;
  module.controls().set_custom_all_gather(std::move(made));
}

void set_custom_reduce_scatter(ShardedModule& module, py::object comm, py::object process_group) {
  auto made =
      comm.is_none() ? nullptr : std::make_shared<PythonReduceScatter>(std::move(comm), std::move(process_group));
  py::gil_scoped_release no_gil;
  module.controls().set_custom_reduce_scatter(std::move(made));
}

py::list group_comms(ShardedModule& module) {
  py::list comms;
  for (const auto& group : handles::state(module.controls()).live_groups()) {
    const auto& config = group->options().reduce;
    comms.append(py::make_tuple(group->identity().mesh_info.shard_group->ranks(),
                                object_of<PythonAllGather>(group->options().memory.custom_all_gather),
                                object_of<PythonReduceScatter>(config.custom_reduce_scatter), config.forces_sum,
                                config.max_input_buffers));
  }
  return comms;
}

void set_all_reduce_hook(ShardedModule& module, py::object hook) {
  AllReduceHook made;
  if (!hook.is_none())
    made = [hook = std::make_shared<PyRef>(std::move(hook))](const AllReduceCall& call) -> AllReduceResult {
      return {.gradients = call.gradients, .work = std::make_shared<HookedWork>(call, hook)};
    };
  py::gil_scoped_release no_gil;
  module.controls().set_all_reduce_hook(std::move(made));
}

}  // namespace fsdp::python
