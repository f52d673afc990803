#include "sharded_module/root_inputs.hpp"

#include <ATen/record_function.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "fsdp/forward_scope.hpp"

namespace fsdp::python {

namespace {

/// A tensor in `value`, or in its tuples, lists and dicts.
bool is_elsewhere(py::handle value, c10::Device device) {
  const RecursionLevel level(" while looking for tensors in a module's inputs");
  const auto is_one_elsewhere = [&](py::handle element) { return is_elsewhere(element, device); };
  if (THPVariable_Check(value.ptr())) {
    const auto& tensor = THPVariable_Unpack(value.ptr());
    return tensor.defined() && tensor.device() != device;
  }
  if (PyTuple_Check(value.ptr()) || PyList_Check(value.ptr())) return std::any_of(value.begin(), value.end(), is_one_elsewhere);
  if (!PyDict_Check(value.ptr())) return false;
  const auto dict = py::reinterpret_borrow<py::dict>(value);
  return std::any_of(dict.begin(), dict.end(), [&](const auto& item) { return is_one_elsewhere(item.second); });
}

}  // namespace

bool move_inputs(const FSDPModule& module, py::tuple& args, py::dict& kwargs) {
  const auto device = detail::input_device(module);
  if (!device || (!is_elsewhere(args, *device) && !is_elsewhere(kwargs, *device))) return false;
  RECORD_USER_SCOPE("FSDP::inputs_to_device");
  const auto there = py::reinterpret_steal<py::object>(THPDevice_New(*device));
  const py::tuple moved = py::module_::import("torch.distributed.utils")
                              .attr("_to_kwargs")(args, kwargs, there, /*use_side_stream_for_tensor_copies=*/false);
  args = moved[0].cast<py::tuple>()[0];
  kwargs = moved[1].cast<py::tuple>()[0];
  return true;
}

}  // namespace fsdp::python
