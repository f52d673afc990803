#include "local_shards.hpp"

#include "api/params/grad_norm.hpp"
#include "fsdp/error.hpp"
#include "fsdp/local_shards.hpp"
#include "fsdp/parameters.hpp"
#include "module/handles.hpp"
#include "shown/shown_registry.hpp"

namespace fsdp::python {

namespace {

template <class Visit>
void for_params(ModuleState& root, const Visit& visit) {
  root.visit([&](ModuleState& state) {
    for (const auto& group : state.live_groups())
      for (const auto& param : group->params())
        if (const auto shown = param.has_moved_away ? nullptr : shown_registry().find(param.local_tensor())) visit(*shown);
  });
}

/// Called without the interpreter's lock.
ShardLabel label_of(const py::object& label) {
  if (label.is_none()) return {};
  return [&label](const std::string& name, const at::Tensor& parameter) {
    py::gil_scoped_acquire gil;
    const py::object found = label(name, shown_registry().find(parameter)->sharded().object());
    if (!py::isinstance<py::str>(found))
      throw py::type_error("local_shards: label: expected a str for '" + name + "', found " +
                           py::repr(found).cast<std::string>());
    return found.cast<std::string>();
  };
}

py::dict as_dict(const LocalShard& local) {
  py::list parts;
  for (const auto& part : local.parts) {
    py::dict one;
    one["name"] = part.name;
    one["parameter"] = shown_registry().find(part.parameter)->sharded().object();
    one["offset"] = part.offset;
    one["numel"] = part.numel;
    parts.append(std::move(one));
  }
  py::dict all;
  all["shard"] = py::cast(local.shard);
  all["label"] = local.label;
  all["module"] = local.module;
  all["parts"] = std::move(parts);
  return all;
}

}  // namespace

py::list local_shards(const std::vector<std::shared_ptr<ShardedModule>>& roots, const py::object& label) {
  for (const auto& root : roots) {
    present(root, "a sharded module");
    for_params(handles::state(root->controls()), [](ShownParam& param) {
      if (const auto user = param.user()) user->before_use(ParamUser::Use::kAll);
    });
  }
  py::list found;
  for (const auto& root : roots) {
    auto& state = handles::state(root->controls());
    for_params(state, [](ShownParam& param) {
      if (param.sharded().holds_subclass())
        throw UsageError("local_shards: parameter '" + param.forms().entries().name() +
                         "' has fsdp_pre_all_gather, so that only its tensor subclass knows where its values are; give the "
                         "optimizer the parameters themselves");
      param.take_over();
    });
    const auto shards = [&] {
      py::gil_scoped_release no_gil;
      return fsdp::local_shards(*root->modules().front(), label_of(label));
    }();
    for_params(state, [](ShownParam& param) {
      follow_home(param);
      param.show_gradient();
    });
    for (const auto& local : shards) found.append(as_dict(local));
  }
  return found;
}

at::Tensor clip_grad_norm(const py::iterable& parameters, double max_norm, double norm_type, bool error_if_nonfinite) {
  std::vector<at::Tensor> tensors;
  std::optional<std::unordered_map<const c10::TensorImpl*, std::shared_ptr<ShownParam>>> dtensors;
  for (const auto& parameter : parameters) {
    const auto tensor = tensor_of(parameter);
    if (!is_dtensor(parameter)) {
      tensors.push_back(tensor);
      continue;
    }
    if (!dtensors) dtensors = shown_registry().all_by_dtensor();
    const auto shown = dtensors->find(tensor.unsafeGetTensorImpl());
    if (shown == dtensors->end())
      throw py::type_error("clip_grad_norm_: expected parameters of modules that fsdp.fully_shard has sharded, local "
                           "shards or plain tensors, found another DTensor; use torch.nn.utils.clip_grad_norm_ where "
                           "all parameters are DTensors");
    shown->second->take_over();
    tensors.push_back(shown->second->sharded().local_tensor());
  }
  py::gil_scoped_release no_gil;
  return clip_grad_norm_on_device(tensors, max_norm, norm_type, error_if_nonfinite, ZeroNorm::kNotZero);
}

}  // namespace fsdp::python
