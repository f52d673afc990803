#include "sharded_module/sharded_module.hpp"

#include <ATen/record_function.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <unordered_map>

#include "fsdp/error.hpp"
#include "module/handles.hpp"
#include "root/configure.hpp"
#include "root/group_port.hpp"
#include "sharded_module/applied_params.hpp"
#include "sharded_module/root_inputs.hpp"
#include "shown/shown_registry.hpp"

namespace fsdp::python {

namespace {

/// Guarded by the interpreter's lock.
auto& by_state() {
  static auto* all = new std::unordered_map<const ModuleState*, std::weak_ptr<ShardedModule>>;
  return *all;
}

bool shows_full(const std::shared_ptr<ShownParam>& param) { return param->forms().is_full(); }

/// They have no memory that parameters could be gathered into.
void refuse_fake_tensors() {
  using c10::impl::TorchDispatchModeTLS;
  if (TorchDispatchModeTLS::any_modes_set() && TorchDispatchModeTLS::get_mode(c10::impl::TorchDispatchModeKey::FAKE))
    throw StateError(
        "forward: a sharded module was called under FakeTensorMode (torch.export), whose tensors have no memory to "
        "gather its parameters into; export the module before fully_shard");
}

/// While it lives, what the core does is not part of a transform of torch.func that a forward runs under.
struct OutsideTransforms {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::DispatchKeySet(
      {c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
};

}  // namespace

ShardedModule::ShardedModule(FSDPModule controls, std::vector<std::shared_ptr<Mirror>> modules, BoundaryCasts casts)
    : controls_(std::move(controls)),
      view_(std::make_shared<ParamsView>(controls_, std::move(modules))),
      casts_(std::move(casts)) {}

ShardedModule::~ShardedModule() {
  py::gil_scoped_acquire gil;
  by_state().erase(&handles::state(controls_));
  params().set({});
  casts_.apply = py::object();
}

std::shared_ptr<ShardedModule> ShardedModule::of(const ModuleState& state) {
  const auto found = by_state().find(&state);
  return found == by_state().end() ? nullptr : found->second.lock();
}

void ShardedModule::attach() { handles::state(controls_).set_pass(std::make_shared<ModulePass>(view_, modules().size())); }

void ShardedModule::find_params() {
  by_state()[&handles::state(controls_)] = weak_from_this();
  std::vector<std::shared_ptr<ShownParam>> found;
  for (const auto& group : handles::state(controls_).live_groups()) {
    configure(*group, [](GroupOptions& options) { options.residency.stays_after_evaluation = true; });
    for (const auto& param : group->params())
      if (!param.has_moved_away)
        if (auto shown = shown_registry().find(param.local_tensor())) found.push_back(std::move(shown));
  }
  params().set(std::move(found));  // only now: nothing else keeps those that stay
  for (const auto& param : params().all()) {
    param->set_user(weak_from_this());
    follow_home(*param);
  }
}

void ShardedModule::before_use(Use use) {
  if (use == Use::kOperator) return pass().begin(context());
  if (context().is_quiescent() && !context().step().is_pinned()) view_->take_replaced();
}

bool ShardedModule::records_autograd(const py::tuple& args) const {
  if (!at::GradMode::is_enabled()) return false;
  if (params().require_grad()) return true;
  return std::any_of(args.begin(), args.end(), [](const py::handle& arg) {
    if (!THPVariable_Check(arg.ptr())) return false;
    const auto& tensor = THPVariable_Unpack(arg.ptr());
    return tensor.defined() && tensor.requires_grad();
  });
}

void ShardedModule::enter(size_t index, bool records_autograd) {
  std::optional<Shows> form;
  {
    py::gil_scoped_release no_gil;
    const OutsideTransforms outside;
    form = pass().enter(context(), index, records_autograd);
  }
  if (form) view_->show(*form);
}

void ShardedModule::leave() {
  const bool keeps_post_forward_shard = at::GradMode::is_enabled() && params().have_post_forward_mesh();
  std::optional<Shows> form;
  {
    py::gil_scoped_release no_gil;
    const OutsideTransforms outside;
    form = pass().leave(context(), keeps_post_forward_shard);
  }
  if (form) view_->show(*form);
}

/// The modules show what they are to show behind `event`.
void ShardedModule::tell(ShowsEvent event) {
  py::gil_scoped_release no_gil;
  std::lock_guard lock(context().mutex());
  pass().show_behind(event);
}

/// As before fully_shard: no gather, no cast. False: none of the parameters is whole.
bool ShardedModule::run_with_full_parameters(const py::tuple& args) const {
  if (std::ranges::none_of(params().all(), shows_full)) return false;
  if (records_autograd(args) || !std::ranges::all_of(params().all(), shows_full))
    context().step().check(StepEvent::kForwardBegins);
  return true;
}

void ShardedModule::before_apply() {
  if (handles::state(controls_).root()->context()->step().is_pinned())
    throw StateError("full parameters are shown (fsdp.FullParameters), so the module cannot be moved or converted; "
                     "end that first");
  // Of those below, too, before the first of them changes what stands in the others' places as well (a tie).
  handles::state(controls_).visit([](ModuleState& below) {
    if (const auto module = of(below)) module->view_->take_replaced();
  });
  reshard();
  apply_.begin(params());
}

py::object ShardedModule::pre_forward(size_t index, py::tuple args, py::dict kwargs) {
  if (index >= modules().size()) throw py::index_error("pre_forward: no module has this index");
  pass().try_to_enter(context(), index);
  refuse_fake_tensors();
  pass().begin(context());
  if (context().step().is_pinned() && run_with_full_parameters(args)) return py::none();
  if (post_optim_event_.is_set())
    post_optim_event_.wait(context(), handles::state(controls_).request().mesh_info.mesh.device());
  const bool has_moved = move_inputs(controls_, args, kwargs);
  enter(index, records_autograd(args));
  if (!casts_.inputs || casts_.is_exempt[index] || handles::state(controls_).precision().computes_in_own_dtype())
    return has_moved ? py::object(py::make_tuple(args, kwargs)) : py::none();
  RECORD_USER_SCOPE("FSDP::cast_forward_inputs");
  return py::make_tuple(cast_all(casts_, args, *casts_.inputs), cast_all(casts_, kwargs, *casts_.inputs));
}

py::object ShardedModule::post_forward(size_t index, py::object output) {
  if (!pass().ends_what_has_entered(context(), index)) return py::none();
  try {
    if (at::GradMode::is_enabled()) watch_backward(output);
    output = cast_output(std::move(output));
  } catch (...) {
    leave();
    throw;
  }
  leave();
  return output;
}

/// None: nothing changes.
py::object ShardedModule::cast_output(py::object output) const {
  if (!casts_.outputs || output.is_none()) return py::none();
  RECORD_USER_SCOPE("FSDP::cast_forward_outputs");
  return cast_all(casts_, std::move(output), *casts_.outputs);
}

/// The backward is the root's also where it needs none of the unsharded parameters.
void ShardedModule::watch_backward(const py::object& output) {
  const bool gathers = params().have_hooks();  // operators that read what these have made do not reach the core
  for_tensors(casts_, output, [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.requires_grad()) return;
    tensor.register_hook([weak = weak_from_this(), gathers](const at::Tensor&) {
      if (const auto self = weak.lock()) self->pass().reach_backward(handles::state(self->controls_).context(), gathers);
    });
  });
}

void ShardedModule::set_post_optim_event(py::object event) {
  PostOptimEvent recorded(std::move(event));
  if (const auto root = of(*handles::state(controls_).root())) root->post_optim_event_ = std::move(recorded);
}

void ShardedModule::set_post_forward_mesh(PostForwardMesh mesh) {
  if (pass().shows() == Shows::kPostForward) tell(ShowsEvent::kUserReshards);  // those over the mesh there was
  params().set_post_forward_mesh(std::move(mesh));
}

void ShardedModule::unshard() {
  pass().begin(context());
  py::gil_scoped_release no_gil;
  static_cast<void>(controls_.unshard_async());  // the wait is unshard_done's
}

void ShardedModule::unshard_done() {
  {
    py::gil_scoped_release no_gil;
    handles::unshard(handles::shared_state(controls_)).wait();
  }
  tell(ShowsEvent::kUserWaited);
}

void ShardedModule::reshard() {
  {
    py::gil_scoped_release no_gil;
    controls_.reshard();
  }
  tell(ShowsEvent::kUserReshards);
}

void ShardedModule::reset_iter_state() {
  pass().begin(context());
  py::gil_scoped_release no_gil;
  controls_.reset_iter_state();
}

}  // namespace fsdp::python
