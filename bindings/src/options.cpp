#include "options.hpp"

#include <pybind11/chrono.h>

#include "extension/python_extension.hpp"
#include "hooked/hooked_extension.hpp"

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

/// What the Python module holds. Needs the interpreter's lock.
py::object original_of(const Originals& originals, const at::Tensor& parameter) {
  const auto found = originals.find(parameter.unsafeGetTensorImpl());
  return found == originals.end() ? py::cast(parameter) : found->second;
}

/// Called without the interpreter's lock, while the core shards, with what the Python module holds; shared, as
/// options are copied.
template <class Result, class Convert>
auto callback(py::object function, std::shared_ptr<Originals> originals, Convert convert) {
  auto shared = std::make_shared<PyRef>(std::move(function));
  return [shared, originals, convert](const std::string&, const at::Tensor& parameter) -> Result {
    py::gil_scoped_acquire gil;
    return convert(shared->object()(original_of(*originals, parameter)));
  };
}

/// Of None, a dimension, or (dimension, mesh).
std::optional<ShardPlacementResult> placement_of(const py::object& value) {
  if (value.is_none()) return std::nullopt;
  if (!py::isinstance<py::tuple>(value)) return Shard{value.cast<int64_t>()};
  const auto [dim, mesh] = value.cast<std::pair<int64_t, DeviceMesh>>();
  return ShardPlacementResult(Shard{dim}, mesh);
}

/// Of None, or (a dimension or None for each dimension of the mesh, sizes of the whole, mesh).
std::optional<TensorParallel> tensor_parallel_of(const py::object& value) {
  if (value.is_none()) return std::nullopt;
  auto [dims, sizes, mesh] =
      value.cast<std::tuple<std::vector<std::optional<int64_t>>, std::vector<int64_t>, DeviceMesh>>();
  TensorParallel result{.placements = {}, .sizes = std::move(sizes), .mesh = std::move(mesh)};
  for (const auto dim : dims) result.placements.push_back(dim ? Placement(Shard{*dim}) : Placement(Replicate{}));
  return result;
}

std::optional<SanitizerOptions> sanitizer_of(const py::object& value) {
  if (value.is_none()) return std::nullopt;
  return SanitizerOptions{.is_enabled = value.attr("is_enabled").cast<bool>(),
                          .seed = value.attr("seed").cast<uint64_t>(),
                          .quarantine_bytes = value.attr("quarantine_bytes").cast<int64_t>(),
                          .max_delay = value.attr("max_delay").cast<std::chrono::microseconds>()};
}

/// What FSDP2's function has no argument for.
void set_own_options(FullyShardOptions& options, const py::dict& arguments, Mirrors& mirrors) {
  for (const auto& module : arguments["ignored_modules"]) options.ignored_modules.push_back(mirrors.follow(module));
  for (const auto& parameter : arguments["replicated_params"])
    options.replicated_params.push_back(mirrors.seen(parameter));
  options.sync_from_rank0 = arguments["sync_from_rank0"].cast<bool>();
  options.sanitizer = sanitizer_of(arguments["sanitizer"]);
}

/// function: (Python module) -> whether mixed precision leaves it alone; None: it leaves none.
std::function<bool(const torch::nn::Module&)> exempts(py::object function) {
  if (function.is_none()) return {};
  auto shared = std::make_shared<PyRef>(std::move(function));
  return [shared](const torch::nn::Module& module) {
    const auto* mirror = dynamic_cast<const Mirror*>(&module);
    const InterpreterLock lock;
    return mirror != nullptr && shared->object()(mirror->module()).cast<bool>();
  };
}

void set_policy(ShardCall& call, const py::dict& arguments, const std::shared_ptr<Originals>& originals) {
  auto& policy = call.options.mp_policy;
  policy.param_dtype = dtype_of(arguments["param_dtype"]);
  policy.reduce_dtype = dtype_of(arguments["reduce_dtype"]);
  call.reduces_in_own_dtype = arguments["reduce_in_own_dtype"].cast<bool>();
  policy.buffer_dtype = dtype_of(arguments["buffer_dtype"]);
  policy.full_precision_in_eval = arguments["full_precision_in_eval"].cast<bool>();
  policy.cast_forward_inputs = false;  // modules' hooks do that
  policy.is_exempt = exempts(arguments["is_exempt"]);
  if (const py::object function = arguments["param_dtype_override_fn"]; !function.is_none())
    policy.param_dtype_override = callback<std::optional<at::ScalarType>>(
        function, originals, [](const py::object& value) { return dtype_of(value); });
  call.output_dtype = dtype_of(arguments["output_dtype"]);
  if (arguments["cast_forward_inputs"].cast<bool>()) call.input_dtype = policy.param_dtype;
  call.apply_to_tensors = arguments["apply_to_tensors"];
}

/// asked: the user's function (name, parameter) -> AllGatherExtension; parameters with hooks of their own have those.
void set_extensions(FullyShardOptions& options, const py::object& placer, py::object asked,
                    const std::shared_ptr<Originals>& originals) {
  if (!placer.attr("has_hooked").cast<bool>() && asked.is_none()) return;
  struct Functions {
    PyRef hooked, asked;
  };
  const auto functions = std::make_shared<Functions>(Functions{PyRef(placer.attr("hooked")), PyRef(std::move(asked))});
  options.all_gather_extension_fn = [functions, originals](const std::string& name, const at::Tensor& parameter)
      -> std::shared_ptr<AllGatherExtension> {
    py::gil_scoped_acquire gil;
    const py::object original = original_of(*originals, parameter);
    if (const py::object hooked = functions->hooked.object()(original); !hooked.is_none())
      return std::make_shared<HookedExtension>(hooked);
    const py::object user = functions->asked.object();
    return user.is_none() ? nullptr : extension_of(user(name, original));
  };
}

}  // namespace

ShardCall shard_call(const py::object& placer, const py::dict& arguments, Mirrors& mirrors,
                     const std::shared_ptr<Originals>& originals) {
  ShardCall call;
  auto& options = call.options;
  options.mesh = placer.attr("core_mesh").cast<DeviceMesh>();
  options.replicate_only = placer.attr("replicates_only").cast<bool>();
  options.reshard_after_forward = reshard_of(arguments["reshard_after_forward"]);
  for (const auto& parameter : arguments["ignored_params"]) options.ignored_params.push_back(mirrors.seen(parameter));
  set_own_options(options, arguments, mirrors);
  set_policy(call, arguments, originals);
  if (arguments["offloads"].cast<bool>())
    options.offload_policy = CPUOffloadPolicy{.pin_memory = arguments["pin_memory"].cast<bool>()};
  if (const py::object function = placer.attr("placement_fn"); !function.is_none())
    options.shard_placement_fn = callback<std::optional<ShardPlacementResult>>(function, originals, &placement_of);
  if (const py::object function = placer.attr("tensor_parallel_fn"); !function.is_none())
    options.tensor_parallel_fn = callback<std::optional<TensorParallel>>(function, originals, &tensor_parallel_of);
  set_extensions(options, placer, arguments["all_gather_extension_fn"], originals);
  return call;
}

}  // namespace fsdp::python
