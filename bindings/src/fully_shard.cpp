#include "fully_shard.hpp"

#include <torch/csrc/autograd/python_variable.h>

#include <unordered_map>

#include "options.hpp"

namespace fsdp::python {

namespace {

using Params = std::unordered_map<const c10::TensorImpl*, std::shared_ptr<ShownParam>>;

/// The parameters of a group as Python is to show them, by handle. Those that came from another group keep
/// what shows them.
void make_shown(const ParamGroup& group, const py::object& mesh, Params& params) {
  const auto& side = python_side();
  for (const auto& param : group.params()) {
    auto shown = ShownParam::find(param.registered());
    if (!shown) {
      const bool is_cut = !param.sizes().empty();  // what has no dimensions is replicated
      const auto placements =
          side.placements(mesh, is_cut ? py::object(py::int_(param.layout().dim())) : py::object(py::none()));
      const auto sharded = side.dtensors.make_parameter(param.registered().detach(), mesh, placements,
                                                        py::cast(c10::IntArrayRef(param.sizes())),
                                                        py::cast(c10::IntArrayRef(param.strides())), param.requires_grad());
      const auto unsharded = py::reinterpret_steal<py::object>(THPVariable_Wrap(param.handle()));
      shown = std::make_shared<ShownParam>(param.registered(), unsharded, sharded, side.dtensors);
      shown->remember(shown);
    }
    params.emplace(param.handle().unsafeGetTensorImpl(), std::move(shown));
  }
}

/// Every entry of the trees that holds one of the handles shows the DTensor from now on.
void take_places(const std::vector<std::shared_ptr<Mirror>>& visited, const Params& params) {
  for (const auto& mirror : visited)
    for (const auto& [place, value] : mirror->entries()) {
      const auto tensor = tensor_of(value);
      const auto found = tensor.defined() ? params.find(tensor.unsafeGetTensorImpl()) : params.end();
      if (found != params.end()) found->second->add_place(place);
    }
}

}  // namespace

PythonSide& python_side() {
  static auto* side = new PythonSide;
  return *side;
}

std::shared_ptr<ShardedModule> shard(const py::list& modules, const py::object& mesh, const DeviceMesh& core_mesh,
                                     const py::dict& arguments) {
  auto call = shard_call(core_mesh, arguments);
  Mirrors mirrors(python_side().mirrors, python_side().is_left_out);
  std::vector<std::shared_ptr<Mirror>> units, visited;
  std::vector<std::shared_ptr<torch::nn::Module>> raw;
  for (const auto& module : modules) {
    units.push_back(mirrors.follow(module, visited));
    raw.push_back(units.back());
  }
  auto controls = [&] {
    py::gil_scoped_release no_gil;
    return fsdp::fully_shard(raw, call.options);
  }();
  Params params;
  for (const auto& group : controls.state().live_groups()) make_shown(*group, mesh, params);
  take_places(visited, params);
  auto sharded = std::make_shared<ShardedModule>(
      std::move(controls), std::move(units),
      BoundaryCasts{call.input_dtype, call.output_dtype, std::move(call.apply_to_tensors)});
  // Ties may have come here from groups below, where the others have moved together.
  sharded->find_params();
  sharded->controls().state().visit([](ModuleState& below) {
    if (const auto shown = ShardedModule::of(below)) shown->find_params();
  });
  return sharded;
}

}  // namespace fsdp::python
