#include "sharded_module/sharded_module.hpp"

#include <ATen/record_function.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <unordered_map>

#include "fsdp/error.hpp"
#include "module/handles.hpp"
#include "root/configure.hpp"
#include "root/group_port.hpp"
#include "hooked/late_hooks.hpp"
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
      modules_(std::move(modules)),
      casts_(std::move(casts)),
      passes_(modules_.size()) {}

ShardedModule::~ShardedModule() {
  py::gil_scoped_acquire gil;
  by_state().erase(&handles::state(controls_));
  params_.set({});
  casts_.apply = py::object();
}

std::shared_ptr<ShardedModule> ShardedModule::of(const ModuleState& state) {
  const auto found = by_state().find(&state);
  return found == by_state().end() ? nullptr : found->second.lock();
}

void ShardedModule::find_params() {
  by_state()[&handles::state(controls_)] = weak_from_this();
  std::vector<std::shared_ptr<ShownParam>> found;
  for (const auto& group : handles::state(controls_).live_groups()) {
    configure(*group, [](GroupOptions& options) { options.residency.stays_after_evaluation = true; });
    for (const auto& param : group->params())
      if (!param.has_moved_away)
        if (auto shown = shown_registry().find(param.local_tensor())) found.push_back(std::move(shown));
  }
  params_.set(std::move(found));  // only now: nothing else keeps those that stay
  for (const auto& param : params_.all()) {
    param->set_user(weak_from_this());
    follow_home(*param);
  }
}

void ShardedModule::follow_root() {
  auto root = handles::state(controls_).root();
  if (followed_ == root->context().get()) return;
  if (const auto shown = of(*root); shown && shown.get() != this) {
    shown->follow_root();
    followed_ = root->context().get();
    return;
  }
  follower_ = std::make_shared<RootFollower>(*root);
  root->context()->hooks().follower = follower_;
  // Outside a step: inside one, operators on sharded parameters mean the unsharded parameters.
  follower_->visit([](ShardedModule& module) { module.begin(); });
  followed_ = root->context().get();  // only now: it may have thrown, and is to be tried again then
}

void ShardedModule::begin() {
  if (has_begun_ || params_.form() != Form::kSharded) return take_replaced();
  if (params_.are_replaced() && is_in_functional_call()) return;
  take_over_changed(handles::state(controls_).live_groups(), params_);
  take_late_hooks(params_);
  has_begun_ = true;
}

void ShardedModule::take_replaced() {
  if (params_.are_replaced()) take_over_replaced(handles::state(controls_).live_groups(), params_);
}

void ShardedModule::before_use(Use use) {
  if (use == Use::kOperator) return follow_root();
  if (context().is_quiescent() && !context().step().is_pinned()) take_replaced();
}

bool ShardedModule::is_kept() const {
  const auto groups = handles::state(controls_).live_groups();
  return std::ranges::any_of(groups, [](const auto& group) {
    const auto& holds = root_of(*group).runner().scheduler().groups()[group->identity().id].holds;
    const bool is_meant_to = holds.has(Hold::kByUser) || holds.has(Hold::kAfterEvaluation);
    return group->unsharder().is_held() && (is_meant_to || !group->options().residency.reshard_after_backward);
  });
}

/// What has been released need not wait for the end of backward to be shown so.
void ShardedModule::before_hook() {
  const auto groups = handles::state(controls_).live_groups();
  const bool is_held = std::ranges::any_of(groups, [](const auto& group) { return group->unsharder().is_held(); });
  if (params_.form() == Form::kUnsharded && !passes_.is_inside() && !is_held) params_.show_as(Form::kSharded);
}

bool ShardedModule::reshards_after_forward() const {
  const auto groups = handles::state(controls_).live_groups();
  return std::ranges::any_of(groups, [](const auto& group) { return group->options().residency.after_forward.reshard; });
}

bool ShardedModule::records_autograd(const py::tuple& args) const {
  if (!at::GradMode::is_enabled()) return false;
  if (params_.require_grad()) return true;
  return std::any_of(args.begin(), args.end(), [](const py::handle& arg) {
    if (!THPVariable_Check(arg.ptr())) return false;
    const auto& tensor = THPVariable_Unpack(arg.ptr());
    return tensor.defined() && tensor.requires_grad();
  });
}

/// As an operator on one of its parameters would.
void ShardedModule::use(bool records_autograd) {
  const OutsideTransforms outside;
  std::vector<ParamOwner*> owners;
  const auto groups = handles::state(controls_).live_groups();
  for (const auto& group : groups) owners.push_back(&group->parts().owner());
  context().enter_scope();
  try {
    if (!owners.empty()) owners[0]->make_resident(owners, {.records_autograd = records_autograd});
  } catch (...) {
    context().leave_scope();
    throw;
  }
}

/// Operators that read what a user's hook has made do not reach the core.
void ShardedModule::gather_in_backward() {
  py::gil_scoped_release no_gil;
  std::vector<ParamOwner*> owners;
  const auto groups = handles::state(controls_).live_groups();
  for (const auto& group : groups) owners.push_back(&group->parts().owner());
  if (!owners.empty()) owners[0]->make_resident(owners, {});
}

/// As before fully_shard: no gather, no cast. False: none of the parameters is whole.
bool ShardedModule::run_with_full_parameters(const py::tuple& args) const {
  if (std::ranges::none_of(params_.all(), shows_full)) return false;
  if (records_autograd(args) || !std::ranges::all_of(params_.all(), shows_full))
    context().step().check(StepEvent::kForwardBegins);
  return true;
}

void ShardedModule::before_apply() {
  if (handles::state(controls_).root()->context()->step().is_pinned())
    throw StateError("full parameters are shown (fsdp.FullParameters), so the module cannot be moved or converted; "
                     "end that first");
  // Of those below, too, before the first of them changes what stands in the others' places as well (a tie).
  handles::state(controls_).visit([](ModuleState& below) {
    if (const auto module = of(below)) module->take_replaced();
  });
  reshard();
  apply_.begin(params_);
}

py::object ShardedModule::pre_forward(size_t index, py::tuple args, py::dict kwargs) {
  if (index >= modules_.size()) throw py::index_error("pre_forward: no module has this index");
  passes_.try_to_enter(index);
  refuse_fake_tensors();
  follow_root();
  if (context().step().is_pinned() && run_with_full_parameters(args)) return py::none();
  if (post_optim_event_.is_set())
    post_optim_event_.wait(context(), handles::state(controls_).request().mesh_info.mesh.device());
  const bool has_moved = move_inputs(controls_, args, kwargs);
  const bool records = records_autograd(args);
  {
    py::gil_scoped_release no_gil;
    use(records);
  }
  passes_.enter(index);
  if (params_.form() != Form::kUnsharded) params_.show_as(Form::kUnsharded);
  if (!casts_.inputs || casts_.is_exempt[index] || handles::state(controls_).precision().computes_in_own_dtype())
    return has_moved ? py::object(py::make_tuple(args, kwargs)) : py::none();
  RECORD_USER_SCOPE("FSDP::cast_forward_inputs");
  return py::make_tuple(cast_all(casts_, args, *casts_.inputs), cast_all(casts_, kwargs, *casts_.inputs));
}

py::object ShardedModule::post_forward(size_t index, py::object output) {
  if (!passes_.ends_what_has_entered(index)) return py::none();
  const bool reshards = passes_.leave() && reshards_after_forward();
  const auto leave = c10::make_scope_exit([this, reshards] {
    py::gil_scoped_release no_gil;
    const OutsideTransforms outside;
    if (reshards)
      for (const auto& group : handles::state(controls_).live_groups()) context().control(*group, GroupEvent::kUserLetsGo);
    context().leave_scope();
  });
  if (reshards && params_.form() == Form::kUnsharded) params_.show_as(params_.released_form());
  if (at::GradMode::is_enabled()) watch_backward(output);
  if (!casts_.outputs || output.is_none()) return py::none();
  RECORD_USER_SCOPE("FSDP::cast_forward_outputs");
  return cast_all(casts_, std::move(output), *casts_.outputs);
}

/// The backward is the root's also where it needs none of the unsharded parameters. A part of the forward that runs again in
/// it (activation checkpointing) may do so without this module's hooks, and is to find the parameters.
void ShardedModule::watch_backward(const py::object& output) {
  for_tensors(casts_, output, [this](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.requires_grad()) return;
    tensor.register_hook([weak = weak_from_this()](const at::Tensor&) {
      const auto self = weak.lock();
      if (!self) return;
      self->context().join_backward();
      py::gil_scoped_acquire gil;
      if (self->params_.form() == Form::kUnsharded) return;
      if (self->params_.have_hooks()) self->gather_in_backward();
      self->params_.show_as(Form::kUnsharded);
      // A backward that needs none of the unsharded parameters does not reach the core, which would tell of its end.
      torch::autograd::Engine::get_default_engine().queue_callback([weak] {
        const auto module = weak.lock();
        if (!module) return;
        py::gil_scoped_acquire lock;
        if (!module->passes_.is_inside() && !module->is_kept()) module->params_.show_as(Form::kSharded);
      });
    });
  });
}

void ShardedModule::set_post_optim_event(py::object event) {
  PostOptimEvent recorded(std::move(event));
  if (const auto root = of(*handles::state(controls_).root())) root->post_optim_event_ = std::move(recorded);
}

void ShardedModule::unshard() {
  follow_root();
  py::gil_scoped_release no_gil;
  static_cast<void>(controls_.unshard_async());  // the wait is unshard_done's
}

void ShardedModule::unshard_done() {
  {
    py::gil_scoped_release no_gil;
    handles::unshard(handles::shared_state(controls_)).wait();
  }
  params_.show_as(Form::kUnsharded);
}

void ShardedModule::reshard() {
  {
    py::gil_scoped_release no_gil;
    controls_.reshard();
  }
  params_.show_as(Form::kSharded);
}

void ShardedModule::reset_iter_state() {
  follow_root();
  {
    py::gil_scoped_release no_gil;
    while (context().step().is_in_scope()) context().leave_scope();
    controls_.reset_iter_state();
  }
  if (!follower_) return;
  follower_->visit([](ShardedModule& module) {
    module.passes_.begin_anew();
    module.params_.show_as(Form::kSharded);
  });
}

void ShardedModule::show_what_is_kept() {
  const auto form = is_kept() ? Form::kUnsharded : Form::kSharded;
  if (params_.form() != form && !passes_.is_inside()) params_.show_as(form);
  params_.show_gradients();
}

}  // namespace fsdp::python
