#include "options.hpp"

namespace fsdp::python {

namespace {

std::optional<at::ScalarType> dtype_of(const py::handle& value) {
  if (value.is_none()) return std::nullopt;
  return value.cast<at::ScalarType>();
}

ReshardAfterForward reshard_of(const py::handle& value) {
  if (value.is_none()) return {};
  if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
  return value.cast<int64_t>();
}

/// Called without the interpreter's lock, while the core shards; shared, as options are copied.
template <class Result, class Convert>
auto callback(py::object function, Convert convert) {
  auto shared = std::make_shared<PyRef>(std::move(function));
  return [shared, convert](const std::string&, const at::Tensor& parameter) -> Result {
    py::gil_scoped_acquire gil;
    return convert(shared->object()(parameter));
  };
}

}  // namespace

ShardCall shard_call(const DeviceMesh& mesh, const py::dict& arguments) {
  ShardCall call;
  auto& options = call.options;
  options.mesh = mesh;
  options.reshard_after_forward = reshard_of(arguments["reshard_after_forward"]);
  for (const auto& parameter : arguments["ignored_params"]) options.ignored_params.push_back(tensor_of(parameter));
  for (const auto& parameter : arguments["replicated_params"])
    options.replicated_params.push_back(tensor_of(parameter));

  auto& policy = options.mp_policy;
  policy.param_dtype = dtype_of(arguments["param_dtype"]);
  policy.reduce_dtype = dtype_of(arguments["reduce_dtype"]);
  // FSDP2 casts at module boundaries only, and exempts no class.
  policy.cast_forward_inputs = false;
  policy.is_exempt = [](const torch::nn::Module&) { return false; };
  if (const py::object function = arguments["param_dtype_override_fn"]; !function.is_none())
    policy.param_dtype_override =
        callback<std::optional<at::ScalarType>>(function, [](const py::object& value) { return dtype_of(value); });
  call.output_dtype = dtype_of(arguments["output_dtype"]);
  if (arguments["cast_forward_inputs"].cast<bool>()) call.input_dtype = policy.param_dtype;
  call.apply_to_tensors = arguments["apply_to_tensors"];

  if (arguments["offloads"].cast<bool>())
    options.offload_policy = CPUOffloadPolicy{.pin_memory = arguments["pin_memory"].cast<bool>()};
  // (parameter) -> the dimension, or None.
  if (const py::object function = arguments["shard_dim_fn"]; !function.is_none())
    options.shard_placement_fn = callback<std::optional<ShardPlacementResult>>(
        function, [](const py::object& dim) -> std::optional<ShardPlacementResult> {
          if (dim.is_none()) return std::nullopt;
          return Shard{dim.cast<int64_t>()};
        });
  return call;
}

}  // namespace fsdp::python
