#include "sharded_module.hpp"

#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <unordered_map>

#include "base/require.hpp"
#include "root/find_param.hpp"
#include "root/group_conversion.hpp"
#include "root/group_port.hpp"

namespace fsdp::python {

namespace {

/// Guarded by the interpreter's lock.
auto& by_state() {
  static auto* all = new std::unordered_map<const ModuleState*, std::weak_ptr<ShardedModule>>;
  return *all;
}

at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() && at::isFloatingType(tensor.scalar_type()) ? tensor.to(dtype) : tensor;
}

/// Calls `visit` with every tensor in a module's output.
template <class Visit>
void for_tensors(const BoundaryCasts& casts, py::handle value, const Visit& visit) {
  const RecursionLevel level(" while looking for tensors in a module's output");
  if (THPVariable_Check(value.ptr())) {
    visit(THPVariable_Unpack(value.ptr()));
  } else if (PyTuple_Check(value.ptr()) || PyList_Check(value.ptr())) {
    for (const auto& element : value) for_tensors(casts, element, visit);
  } else if (PyDict_Check(value.ptr())) {
    for (const auto& [key, element] : py::reinterpret_borrow<py::dict>(value)) for_tensors(casts, element, visit);
  } else if (py::hasattr(value, "__dataclass_fields__")) {
    casts.apply(py::cpp_function([&visit](py::object tensor) {
                  visit(tensor_of(tensor));
                  return tensor;
                }), value);
  }
}

/// Every floating-point tensor in `value`, however deep, in `dtype`.
py::object cast_all(const BoundaryCasts& casts, py::object value, at::ScalarType dtype) {
  if (THPVariable_Check(value.ptr())) return py::cast(cast(tensor_of(value), dtype));
  return casts.apply(py::cpp_function([dtype](const at::Tensor& tensor) { return cast(tensor, dtype); }), value);
}

/// While it lives, what the core does is not part of a transform of torch.func that a forward runs under.
struct OutsideTransforms {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::DispatchKeySet(
      {c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
};

}  // namespace

ShardedModule::ShardedModule(FSDPModule controls, std::vector<std::shared_ptr<Mirror>> modules, BoundaryCasts casts)
    : controls_(std::move(controls)),
      modules_(std::move(modules)),
      casts_(std::move(casts)),
      waits_for_(modules_.size(), true) {}

ShardedModule::~ShardedModule() {
  py::gil_scoped_acquire gil;
  by_state().erase(&controls_.state());
  params_.clear();
  casts_.apply = py::object();
  post_forward_mesh_.mesh = py::object();
}

std::shared_ptr<ShardedModule> ShardedModule::of(const ModuleState& state) {
  const auto found = by_state().find(&state);
  return found == by_state().end() ? nullptr : found->second.lock();
}

void ShardedModule::find_params() {
  by_state()[&controls_.state()] = weak_from_this();
  std::vector<std::shared_ptr<ShownParam>> found;
  for (const auto& group : controls_.state().live_groups()) {
    root_of(*group).set_policy(*group, &GroupPolicy::stays_after_evaluation, true);
    for (const auto& param : group->params())
      if (!param.has_moved_away)
        if (auto shown = ShownParam::find(param.sharded_param())) found.push_back(std::move(shown));
  }
  params_ = std::move(found);  // only now: nothing else keeps those that stay
  for (const auto& param : params_) {
    param->set_user(weak_from_this());
    param->follow_home();
  }
}

void ShardedModule::follow_root() {
  auto root = controls_.state().root();
  if (context_ == root->context().get()) return;
  if (const auto shown = of(*root); shown && shown.get() != this) {
    shown->follow_root();
    context_ = root->context().get();
    return;
  }
  followed_.clear();
  root->visit([&](ModuleState& state) {
    if (auto shown = of(state)) followed_.push_back(shown);
  });
  root->context()->set_follower(weak_from_this());
  // Outside a step: inside one, operators on sharded parameters mean the unsharded parameters.
  for (const auto& weak : followed_)
    if (const auto shown = weak.lock()) shown->take_replaced();
  context_ = root->context().get();  // only now: it may have thrown, and is to be tried again then
}

/// Until the first use, users may put other parameters in the place of the sharded ones. Later, what stands there
/// may be torch.func.functional_call's for the length of a call.
void ShardedModule::take_replaced() {
  if (has_begun_) return;
  const auto is_replaced = [](const auto& param) { return param->is_replaced(); };
  if (form_ == Form::kSharded && std::any_of(params_.begin(), params_.end(), is_replaced)) {
    applied();
    if (std::any_of(params_.begin(), params_.end(), is_replaced)) throw_partly_on_meta();
  }
  has_begun_ = true;
}

void ShardedModule::throw_partly_on_meta() const {
  const auto on_meta = std::find_if(params_.begin(), params_.end(), [](const auto& param) {
    return tensor_of(param->sharded().attr("_local_tensor")).is_meta();
  });
  const auto found = find_param((*on_meta)->sharded_param());
  throw StateError(fmt::format("{}: is on the meta device, but other parameters of its group have been given memory; "
                               "call to_empty(device=...) on its module, too, before using it",
                               found ? found->param().name() : "a parameter"));
}

void ShardedModule::show_as(Form form) {
  form_ = form;
  for (const auto& param : params_) {
    if (form == Form::kUnsharded) param->show_unsharded();
    if (form == Form::kSharded) param->show_sharded();
    if (form == Form::kPostForward) param->show_post_forward(post_forward_mesh_);
  }
}

void ShardedModule::set_post_forward_mesh(PostForwardMesh mesh) {
  if (form_ == Form::kPostForward) show_as(Form::kSharded);
  post_forward_mesh_ = std::move(mesh);
  for (const auto& param : params_) param->drop_post_forward();
}

bool ShardedModule::is_kept() const {
  const auto groups = controls_.state().live_groups();
  return std::ranges::any_of(groups, [](const auto& group) {
    const auto& holds = root_of(*group).runner().scheduler().groups()[group->identity().id].holds;
    const bool is_meant_to = holds.has(Hold::kByUser) || holds.has(Hold::kAfterEvaluation);
    return group->unsharder().is_held() && (is_meant_to || !group->policy().reshard_after_backward);
  });
}

/// What has been released need not wait for the end of backward to be shown so.
void ShardedModule::before_hook() {
  const auto groups = controls_.state().live_groups();
  const bool is_held = std::ranges::any_of(groups, [](const auto& group) { return group->unsharder().is_held(); });
  if (form_ == Form::kUnsharded && depth_ == 0 && !is_held) show_as(Form::kSharded);
}

bool ShardedModule::reshards_after_forward() const {
  const auto groups = controls_.state().live_groups();
  return std::ranges::any_of(groups, [](const auto& group) { return group->policy().after_forward.reshard; });
}

bool ShardedModule::records_autograd(const py::tuple& args) const {
  if (!at::GradMode::is_enabled()) return false;
  const auto needs = [](const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); };
  for (const auto& param : params_)
    if (needs(param->sharded_param())) return true;
  for (const auto& arg : args)
    if (THPVariable_Check(arg.ptr()) && needs(THPVariable_Unpack(arg.ptr()))) return true;
  return false;
}

/// As an operator on one of its parameters would.
void ShardedModule::use(bool records_autograd) {
  const OutsideTransforms outside;
  std::vector<ParamOwner*> owners;
  const auto groups = controls_.state().live_groups();
  for (const auto& group : groups) owners.push_back(&group->owner());
  controls_.state().context()->enter_scope();
  try {
    if (!owners.empty()) owners[0]->make_resident(owners, {.records_autograd = records_autograd});
  } catch (...) {
    controls_.state().context()->leave_scope();
    throw;
  }
}

py::object ShardedModule::pre_forward(size_t index, py::tuple args, py::dict kwargs) {
  if (index >= waits_for_.size()) throw py::index_error("pre_forward: no module has this index");
  follow_root();
  if (post_optim_event_) wait_for_post_optim_event();
  const bool records = records_autograd(args);
  {
    py::gil_scoped_release no_gil;
    use(records);
  }
  ++depth_;
  waits_for_[index] = false;
  if (form_ != Form::kUnsharded) show_as(Form::kUnsharded);
  if (!casts_.inputs) return py::none();
  return py::make_tuple(cast_all(casts_, args, *casts_.inputs), cast_all(casts_, kwargs, *casts_.inputs));
}

py::object ShardedModule::post_forward(py::object output) {
  if (depth_ == 0) return py::none();  // its pre_forward has thrown
  --depth_;
  const bool have_all_run = std::none_of(waits_for_.begin(), waits_for_.end(), [](bool waits) { return waits; });
  const bool reshards = have_all_run && depth_ == 0 && reshards_after_forward();
  const auto leave = c10::make_scope_exit([this, reshards] {
    py::gil_scoped_release no_gil;
    const OutsideTransforms outside;
    auto& context = *controls_.state().context();
    if (reshards)
      for (const auto& group : controls_.state().live_groups()) context.end_hold(*group);
    context.leave_scope();
  });
  if (have_all_run && depth_ == 0) waits_for_.assign(modules_.size(), true);
  if (reshards && form_ == Form::kUnsharded)
    show_as(at::GradMode::is_enabled() && post_forward_mesh_.ranks > 0 ? Form::kPostForward : Form::kSharded);
  if (at::GradMode::is_enabled()) watch_backward(output);
  if (!casts_.outputs || output.is_none()) return py::none();
  return cast_all(casts_, std::move(output), *casts_.outputs);
}

/// A part of the forward that runs again in backward (activation checkpointing) may do so without this
/// module's hooks, and is to find the parameters.
void ShardedModule::watch_backward(const py::object& output) {
  for_tensors(casts_, output, [this](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.requires_grad()) return;
    tensor.register_hook([weak = weak_from_this()](const at::Tensor&) {
      const auto self = weak.lock();
      if (!self) return;
      py::gil_scoped_acquire gil;
      if (self->form_ == Form::kUnsharded) return;
      self->show_as(Form::kUnsharded);
      // A backward that needs none of the unsharded parameters does not reach the core, which would tell of its end.
      torch::autograd::Engine::get_default_engine().queue_callback([weak] {
        const auto module = weak.lock();
        if (!module) return;
        py::gil_scoped_acquire lock;
        if (module->depth_ == 0 && !module->is_kept()) module->show_as(Form::kSharded);
      });
    });
  });
}

void ShardedModule::set_post_optim_event(py::object event) {
  if (!event.is_none() && !py::hasattr(event, "wait"))
    throw py::type_error("set_post_optim_event: expected an event that has been recorded, found " +
                         py::repr(event).cast<std::string>());
  if (const auto root = of(*controls_.state().root()))
    root->post_optim_event_ = event.is_none() ? PyRef() : PyRef(std::move(event));
}

/// Gathers do, until the first use of a parameter, if the device has streams. An event that Python made has no form that
/// C++ can wait for, so it is Python that lets the gathers' stream wait.
void ShardedModule::wait_for_post_optim_event() {
  const auto event = PyRef(std::move(post_optim_event_)).object();
  auto& context = *controls_.state().context();
  const auto device = controls_.state().request().mesh_info.mesh.device();
  std::optional<c10::Stream> stream;
  bool is_all_gathered = false;
  {
    py::gil_scoped_release no_gil;
    const std::lock_guard lock(context.mutex());
    stream = context.runner().comm_ctx().all_gather_stream.to_wait_for_event(device);
    is_all_gathered = !context.runner().has_unreleased_groups();
  }
  if (!stream || !is_all_gathered) event.attr("wait")();
  if (!stream) return;
  const auto devices = py::module_::import("torch").attr("get_device_module")(c10::DeviceTypeName(device.type(), true));
  event.attr("wait")(devices.attr("Stream")(py::arg("stream_id") = stream->id(),
                                            py::arg("device_index") = static_cast<int>(stream->device_index()),
                                            py::arg("device_type") = static_cast<int>(stream->device_type())));
}

void ShardedModule::unshard() {
  follow_root();
  py::gil_scoped_release no_gil;
  static_cast<void>(controls_.unshard_async());  // the wait is unshard_done's
}

void ShardedModule::unshard_done() {
  {
    py::gil_scoped_release no_gil;
    UnshardHandle(controls_.shared_state()).wait();
  }
  show_as(Form::kUnsharded);
}

void ShardedModule::reshard() {
  {
    py::gil_scoped_release no_gil;
    controls_.reshard();
  }
  show_as(Form::kSharded);
}

void ShardedModule::reset_iter_state() {
  follow_root();
  {
    py::gil_scoped_release no_gil;
    while (controls_.state().context()->is_in_scope()) controls_.state().context()->leave_scope();
    controls_.reset_iter_state();
  }
  for (const auto& weak : followed_)
    if (const auto shown = weak.lock()) {
      shown->depth_ = 0;
      shown->waits_for_.assign(shown->modules_.size(), true);
      shown->show_as(Form::kSharded);
    }
}

void ShardedModule::before_apply() {
  reshard();
  for (const auto& param : params_) param->before_apply();
}

void ShardedModule::applied() {
  // All parameters of a group go the same way.
  for (const auto& param : params_) param->check_applied();
  std::vector<at::Tensor> locals;
  for (const auto& param : params_) locals.push_back(param->applied_local());
  // `to_empty` goes from module to module, and each of several that share a group comes here: the group follows when
  // the last one has memory.
  const auto is_meta = [](const at::Tensor& local) { return local.is_meta(); };
  if (std::any_of(locals.begin(), locals.end(), is_meta) && !std::all_of(locals.begin(), locals.end(), is_meta)) return;
  for (const auto& group : controls_.state().live_groups()) {
    const auto first = std::find_if(params_.begin(), params_.end(), [&](const auto& shown) {
      return std::any_of(group->params().begin(), group->params().end(), [&](const auto& param) {
        return param.sharded.identity() == shown->sharded_param().unsafeGetTensorImpl();
      });
    });
    if (first == params_.end()) continue;
    const auto& like = locals[static_cast<size_t>(first - params_.begin())];
    const auto& now = (*first)->sharded_param();
    py::gil_scoped_release no_gil;
    if (like.device() != now.device()) fsdp::convert(*group, {.device = like.device()});
    if (at::isFloatingType(like.scalar_type()) && like.scalar_type() != now.scalar_type())
      fsdp::convert(*group, {.dtype = like.scalar_type()});
  }
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < params_.size(); ++i) {
    const auto& home = params_[i]->sharded_param();
    if (!home.is_meta() && !locals[i].is_alias_of(home)) home.copy_(locals[i]);
    params_[i]->point_home();
  }
}

void ShardedModule::take_over() {
  py::gil_scoped_acquire gil;
  for (const auto& weak : followed_)
    if (const auto shown = weak.lock())
      for (const auto& param : shown->params_) param->take_over();
}

void ShardedModule::show() {
  py::gil_scoped_acquire gil;
  for (const auto& weak : followed_) {
    const auto shown = weak.lock();
    if (!shown) continue;
    const auto form = shown->is_kept() ? Form::kUnsharded : Form::kSharded;
    if (shown->form_ != form && shown->depth_ == 0) shown->show_as(form);
    for (const auto& param : shown->params_) param->show_gradient();
  }
}

}  // namespace fsdp::python
