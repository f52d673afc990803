#include "sharded_module/applied_params.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "fsdp/error.hpp"
#include "root/find_param.hpp"
#include "root/group_conversion.hpp"

namespace fsdp::python {

namespace {

bool is_tensor(PyObject* object) { return object != nullptr && object != Py_None && THPVariable_Check(object); }

/// True if a user has put another parameter in the place of the sharded one.
bool is_replaced(const ShownParam& param) {
  PyObject* now = param.forms().entries().now();
  if (!is_tensor(now)) return false;
  // `_apply` on a module below swaps the tensor behind the same object.
  if (now == param.sharded().parameter().get())
    return !param.sharded().holds_subclass() && !param.sharded().local().is_alias_of(param.sharded().sharded_param());
  // A DTensor parameter: torch.func.functional_call puts other tensors there for the length of a call.
  const py::handle parameter(now);
  return is_dtensor(parameter) && py::bool_(parameter.attr("_is_param"));
}

bool is_any_replaced(const ShownParams& params) {
  return std::ranges::any_of(params.all(), [](const auto& param) { return is_replaced(*param); });
}

void check_applied(const ParamEntries& entries) {
  PyObject* now = entries.now();
  if (!is_tensor(now) || !is_dtensor(now))
    throw py::type_error("parameter '" + entries.name() +
                         "' of a sharded module has been replaced by a tensor that is no DTensor; load values with "
                         "load_state_dict(..., assign=False), or DTensors like those of its own state_dict()");
}

/// `_apply` swaps the tensor behind the parameter, or puts another parameter there.
at::Tensor applied_local(ShownParam& param) {
  const auto& sharded = param.sharded();
  if (PyObject* now = param.forms().entries().now(); now != sharded.parameter().get()) {
    sharded.take_over_grad_dtype();  // of the one that goes
    param.replace_sharded(py::reinterpret_borrow<py::object>(now));
  }
  sharded.take_over_grad_dtype();
  return sharded.local();
}

std::vector<at::Tensor> applied_locals(const ShownParams& params) {
  for (const auto& param : params.all()) check_applied(param->forms().entries());
  std::vector<at::Tensor> locals;
  for (const auto& param : params.all()) locals.push_back(applied_local(*param));
  return locals;
}

/// In device and dtype. All parameters of a group go the same way.
void follow_locals(ParamGroup& group, const ShownParams& params, const std::vector<at::Tensor>& locals) {
  const auto first = std::ranges::find_if(params.all(), [&](const auto& shown) {
    const auto* impl = shown->sharded().sharded_param().unsafeGetTensorImpl();
    return std::ranges::any_of(group.params(), [&](const auto& param) { return param.sharded.identity() == impl; });
  });
  if (first == params.all().end()) return;
  const auto& like = locals[static_cast<size_t>(first - params.all().begin())];
  const auto& now = (*first)->sharded().sharded_param();
  py::gil_scoped_release no_gil;
  if (like.device() != now.device()) fsdp::convert(group, {.device = like.device()});
  if (at::isFloatingType(like.scalar_type()) && like.scalar_type() != now.scalar_type())
    fsdp::convert(group, {.dtype = like.scalar_type()});
}

[[noreturn]] void throw_partly_on_meta(const ShownParams& params) {
  const auto on_meta =
      std::ranges::find_if(params.all(), [](const auto& param) { return param->sharded().local().is_meta(); });
  const auto found = find_param((*on_meta)->sharded().sharded_param());
  throw StateError(fmt::format("{}: is on the meta device, but other parameters of its group have been given memory; "
                               "call to_empty(device=...) on its module, too, before using it",
                               found ? found->param().name() : "a parameter"));
}

}  // namespace

void prepare_apply(const ShownParams& params) {
  for (const auto& param : params.all()) {
    param->sharded().take_over_grad_dtype();
    param->take_over_hooks();
    param->gradient().set_aside();
  }
}

void take_over_applied(const Groups& groups, const ShownParams& params) {
  const auto locals = applied_locals(params);
  // `to_empty` goes from module to module, and each of several that share a group comes here: the group follows when
  // the last one has memory.
  const auto is_meta = [](const at::Tensor& local) { return local.is_meta(); };
  if (std::ranges::any_of(locals, is_meta) && !std::ranges::all_of(locals, is_meta)) return;
  for (const auto& group : groups) follow_locals(*group, params, locals);
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < locals.size(); ++i) {
    auto& param = *params.all()[i];
    const auto& home = param.sharded().sharded_param();
    if (!param.sharded().holds_subclass() && !home.is_meta() && !locals[i].is_alias_of(home)) home.copy_(locals[i]);
    param.point_home();
  }
}

void take_over_replaced(const Groups& groups, const ShownParams& params) {
  if (!is_any_replaced(params)) return;
  take_over_applied(groups, params);
  if (is_any_replaced(params)) throw_partly_on_meta(params);
}

}  // namespace fsdp::python
