#include "shown_param.hpp"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <map>

#include "api/params/find_param.hpp"
#include "param/grad_dtype.hpp"
#include "root/group_port.hpp"
#include "tensor/shard_part.hpp"

namespace fsdp::python {

namespace {

/// By sharded parameter; guarded by the interpreter's lock. Never destroyed: parameters may outlive it.
auto& by_registered() {
  static auto* all = new std::unordered_map<const c10::TensorImpl*, std::weak_ptr<ShownParam>>;
  return *all;
}

auto& by_place() {
  static auto* all = new std::map<Place, const ShownParam*>;
  return *all;
}

PyObject* local_tensor_name() {
  static PyObject* name = PyUnicode_InternFromString("_local_tensor");
  return name;
}

/// Hooks of `register_post_accumulate_grad_hook`.
bool has_hooks(const at::Tensor& tensor) {
  return torch::autograd::impl::get_autograd_meta(tensor) != nullptr &&
         torch::autograd::impl::post_acc_grad_hooks(tensor) != nullptr;
}

void check(int status) {
  if (status != 0) throw py::error_already_set();
}

}  // namespace

ShownParam::ShownParam(at::Tensor registered, py::object unsharded, py::object sharded, const DTensorMaker& maker,
                       std::unique_ptr<DTensorHandle> dtensor)
    : sharded_param_(std::move(registered)),
      unsharded_(std::move(unsharded)),
      sharded_(std::move(sharded)),
      dtensor_(std::move(dtensor)),
      home_(sharded_param_.storage().unsafeGetStorageImpl()),
      is_scalar_(tensor_of(unsharded_.object()).dim() == 0),
      maker_(maker) {
  set_grad_dtype(tensor_of(sharded_.object()), grad_dtype_of(sharded_param_));
}

ShownParam::~ShownParam() {
  py::gil_scoped_acquire gil;
  by_registered().erase(sharded_param_.unsafeGetTensorImpl());
  for (const auto& held : places_) by_place().erase(held.place);
}

std::shared_ptr<ShownParam> ShownParam::find(const at::Tensor& registered) {
  const auto found = by_registered().find(registered.unsafeGetTensorImpl());
  return found == by_registered().end() ? nullptr : found->second.lock();
}

std::unordered_map<const c10::TensorImpl*, std::shared_ptr<ShownParam>> ShownParam::all_by_shown() {
  std::unordered_map<const c10::TensorImpl*, std::shared_ptr<ShownParam>> all;
  for (const auto& [registered, weak] : by_registered())
    if (auto param = weak.lock()) all.emplace(tensor_of(param->sharded_.get()).unsafeGetTensorImpl(), std::move(param));
  return all;
}

void ShownParam::remember(const std::shared_ptr<ShownParam>& self) {
  by_registered()[self->sharded_param_.unsafeGetTensorImpl()] = self;
  self->self_ = self;
  self->stand_in(self->sharded_);
}

/// Operators that have ordinary tensors beside the DTensor get the unsharded parameter.
class ShownParam::ForOperators final : public StandIn {
 public:
  explicit ForOperators(std::weak_ptr<ShownParam> shown) : shown_(std::move(shown)) {}

  at::Tensor ordinary() override {
    py::gil_scoped_acquire gil;
    const auto shown = shown_.lock();
    const auto user = shown ? shown->user_.lock() : nullptr;
    // In DTensor's own mode for it, ordinary tensors are replicated ones.
    if (!user || shown->maker_.replicates_ordinary().cast<bool>()) return {};
    user->before_use();
    shown->follow_requires_grad();
    return THPVariable_Unpack(shown->unsharded_.get());
  }
  int64_t version() const override {
    const auto shown = shown_.lock();
    return shown ? static_cast<int64_t>(shown->sharded_param_._version()) : 0;
  }
  bool is_of_scalar() const override {
    const auto shown = shown_.lock();
    return shown && shown->is_scalar_;
  }
  void note_write() override {
    const auto shown = shown_.lock();
    const auto* storage = shown ? ParamStorage::of(shown->sharded_param_.unsafeGetTensorImpl()) : nullptr;
    if (storage != nullptr && storage->owner() != nullptr) storage->owner()->note_write(storage->index());
  }
  bool casts_operands() const override {
    const auto shown = shown_.lock();
    const auto user = shown ? shown->user_.lock() : nullptr;
    return user && user->casts_inputs();
  }
  bool is_refusal(const std::exception& error) const override {
    py::gil_scoped_acquire gil;
    if (const auto* thrown = dynamic_cast<const py::error_already_set*>(&error))
      return thrown->matches(PyExc_Exception);
    auto* raised = const_cast<python_error*>(dynamic_cast<const python_error*>(&error));
    if (raised == nullptr) return false;
    // It may be the interpreter's current error still, under which no Python may run.
    if (raised->type == nullptr) raised->persist();
    return PyErr_GivenExceptionMatches(raised->type, PyExc_Exception);
  }

 private:
  std::weak_ptr<ShownParam> shown_;
};

void ShownParam::stand_in(const PyRef& parameter) {
  if (dtensor_) return;  // its operators have DTensors beside it
  make_stand_in(THPVariable_Unpack(parameter.get()), c10::make_intrusive<ForOperators>(self_));
}

bool ShownParam::shows_at(const at::Tensor& tensor, const Place& place) {
  const auto found = by_place().find(place);
  if (found == by_place().end()) return false;
  const auto* shown = found->second;
  return tensor.is_same(tensor_of(shown->sharded_.get())) || tensor.is_same(tensor_of(shown->computed().get())) ||
         (shown->post_forward_ && tensor.is_same(tensor_of(shown->post_forward_.get())));
}

void ShownParam::add_place(const Place& place) {
  places_.push_back({place, PyRef(py::reinterpret_borrow<py::object>(place.table)), PyRef(py::str(place.name))});
  by_place()[place] = this;
  put(places_.back(), sharded_);
}

void ShownParam::show(const PyRef& parameter) const {
  for (const auto& held : places_) {
    // What the caller has put there stays (functional_call).
    if (is_ours(PyDict_GetItemWithError(held.table.get(), held.key.get()))) put(held, parameter);
  }
}

void ShownParam::show_unsharded() const {
  if (dtensor_) dtensor_->follow();
  show(computed());
}

bool ShownParam::is_ours(const PyObject* parameter) const {
  return parameter != nullptr &&
         (parameter == sharded_.get() || parameter == computed().get() || parameter == post_forward_.get());
}

void ShownParam::show_post_forward(const PostForwardMesh& mesh) {
  const auto param = find_param(sharded_param_);
  const bool is_cut = param && !param->param().spec.sizes().empty();
  if (!is_cut || dtensor_) return show_sharded();
  if (post_forward_) return show(post_forward_);
  const auto& whole = param->param();
  const int64_t dim = whole.layout().dim();
  const ShardLayout layout(whole.spec.sizes(), whole.spec.strides(), dim, mesh.ranks);
  // A view of the unsharded parameter, which is gathered when somebody reads it.
  const auto part = part_of(layout, tensor_of(unsharded_.object()).detach(), mesh.rank);
  const auto geometry = py::make_tuple(c10::IntArrayRef(whole.spec.sizes()), c10::IntArrayRef(whole.spec.strides()));
  post_forward_ = PyRef(maker_.make_post_forward(part, mesh.mesh, dim, geometry, whole.requires_grad()));
  set_grad_dtype(tensor_of(post_forward_.object()), whole.grad_dtype());
  stand_in(post_forward_);
  show(post_forward_);
}

void ShownParam::put(const HeldPlace& held, const PyRef& parameter) {
  check(PyDict_SetItem(held.table.get(), held.key.get(), parameter.get()));
}

void ShownParam::take_over_requires_grad() const {
  const auto& shown = THPVariable_Unpack(sharded_.get());
  if (shown.requires_grad() != sharded_param_.requires_grad()) sharded_param_.set_requires_grad(shown.requires_grad());
}

/// One that was set counts; a DTensor without, which may be new, gets the parameter's.
void ShownParam::take_over_grad_dtype() const {
  const auto& shown = THPVariable_Unpack(sharded_.get());
  const auto asked = grad_dtype_of(shown), known = grad_dtype_of(sharded_param_);
  if (asked == known) return;
  if (asked.is_set)
    set_grad_dtype(sharded_param_, asked);
  else
    set_grad_dtype(shown, known);
}

/// Between steps an operator is to record what the user has just asked for; in one, the next will.
void ShownParam::follow_requires_grad() const {
  if (THPVariable_Unpack(sharded_.get()).requires_grad() == sharded_param_.requires_grad()) return;
  const auto param = find_param(sharded_param_);
  if (!param || root_of(*param->group).in_step()) return;
  take_over_requires_grad();
  param->group->sync_requires_grad();
}

void ShownParam::take_over() {
  take_over_requires_grad();
  take_over_grad_dtype();
  if (!is_watched_ && has_hooks(THPVariable_Unpack(sharded_.get()))) watch_gradient();
  take_over_gradient();
}

void ShownParam::take_over_gradient() {
  const auto& gradient = THPVariable_Unpack(sharded_.get()).grad();
  if (!gradient.defined()) {
    // Where none was shown, what is there waits for the end of its step.
    if (shown_gradient_ != nullptr) sharded_param_.mutable_grad().reset();
    forget_gradient();
    return;
  }
  if (shows_our_gradient()) return;
  // The user's own.
  py::object object = py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient));
  if (!is_dtensor(object))
    throw py::type_error("parameter '" + places_.front().place.name +
                         "': expected its .grad to be a DTensor like the parameter, found an ordinary tensor; make "
                         "one with torch.distributed.tensor.distribute_tensor");
  const auto local = tensor_of(object.attr("_local_tensor"));
  sharded_param_.mutable_grad() = local;
  follow_gradient(gradient, local);
}

/// Among a gradient's own hooks, which go when it does: the sharded parameter's `.grad`, the same memory, is
/// dropped there and then, and not when the next step begins.
class ShownParam::GradientEnd final : public torch::autograd::FunctionPreHook {
 public:
  GradientEnd(std::weak_ptr<ShownParam> shown, const c10::TensorImpl* gradient)
      : shown_(std::move(shown)), gradient_(gradient) {}
  ~GradientEnd() override {
    if (!is_interpreter_alive()) return;
    py::gil_scoped_acquire gil;
    const auto shown = shown_.lock();
    if (!shown || shown->gradient_ != gradient_) return;
    auto& of_sharded = shown->sharded_param_.mutable_grad();
    if (of_sharded.unsafeGetTensorImpl() == shown->shown_gradient_) of_sharded.reset();
    shown->forget_gradient();
  }
  bool is_told(const ShownParam& shown) const { return shown_.lock().get() == &shown; }
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    return gradients;
  }

 private:
  std::weak_ptr<ShownParam> shown_;
  const c10::TensorImpl* gradient_;
};

void ShownParam::follow_gradient(const at::Tensor& gradient, const at::Tensor& local) {
  gradient_ = gradient.unsafeGetTensorImpl();
  shown_gradient_ = local.unsafeGetTensorImpl();
  auto& hooks = torch::autograd::impl::materialize_autograd_meta(gradient)->hooks_;
  const bool is_followed = std::any_of(hooks.begin(), hooks.end(), [this](const auto& hook) {
    const auto* end = dynamic_cast<const GradientEnd*>(hook.get());
    return end != nullptr && end->is_told(*this);
  });
  if (!is_followed) hooks.push_back(std::make_unique<GradientEnd>(self_, gradient_));
}

void ShownParam::forget_gradient() { gradient_ = shown_gradient_ = nullptr; }

void ShownParam::show_gradient() {
  const auto& shown = THPVariable_Unpack(sharded_.get());
  if (shown.requires_grad() != sharded_param_.requires_grad()) shown.set_requires_grad(sharded_param_.requires_grad());
  const auto gradient = sharded_param_.grad();
  if (!gradient.defined()) {
    if (shown_gradient_ != nullptr) shown.mutable_grad().reset();
    forget_gradient();
    return;
  }
  // Shown already, and left, dropped or replaced since: by a hook, say.
  if (gradient.unsafeGetTensorImpl() == shown_gradient_) return take_over_gradient();
  take_autograds_own(gradient);
  put_gradient(gradient);
  if (!is_watched_ && has_hooks(shown)) run_hooks();
}

bool ShownParam::shows_our_gradient() const {
  const auto& shown = THPVariable_Unpack(sharded_.get()).grad();
  return shown.defined() && shown.unsafeGetTensorImpl() == gradient_;
}

/// What a loss gave that is computed from the DTensor itself, beside the modules: autograd has put it on the DTensor
/// since the backward began.
void ShownParam::take_autograds_own(const at::Tensor& gradient) {
  const auto& shown = THPVariable_Unpack(sharded_.get());
  if (!shown.grad().defined() || shows_our_gradient()) return;
  const auto own = py::reinterpret_steal<py::object>(THPVariable_Wrap(shown.grad()));
  const auto local = tensor_of(maker_.local_gradient(own, sharded_.object().attr("placements")));
  at::NoGradGuard no_grad;
  if (const auto param = find_param(sharded_param_)) root_of(*param->group).runner().comm_ctx().let_current_wait_for_reductions();
  gradient.add_(local);
  shown.mutable_grad().reset();
}

void ShownParam::put_gradient(const at::Tensor& gradient) {
  const auto& shown = THPVariable_Unpack(sharded_.get());
  if (shows_our_gradient() && shown.grad().dtype() == gradient.dtype()) {
    // It is the parameter's, added up elsewhere.
    const auto present = py::reinterpret_steal<py::object>(THPVariable_Wrap(shown.grad()));
    const auto local = py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient));
    check(PyObject_SetAttr(present.ptr(), local_tensor_name(), local.ptr()));
    shown_gradient_ = gradient.unsafeGetTensorImpl();
    return;
  }
  forget_gradient();
  const auto made = maker_.make_gradient(gradient, sharded_.object());
  shown.mutable_grad() = tensor_of(made);
  follow_gradient(shown.grad(), gradient);
}

/// On a sharded parameter: the core calls it when it has put a gradient there or added to it, and so for all that
/// have one of the group.
class ShownParam::GradientWatch final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit GradientWatch(std::weak_ptr<ShownParam> shown) : shown_(std::move(shown)) {}
  void operator()(const torch::autograd::Variable&) override {
    py::gil_scoped_acquire gil;
    if (const auto shown = shown_.lock()) shown->run_hooks_in_backward();
  }

 private:
  std::weak_ptr<ShownParam> shown_;
};

void ShownParam::watch_gradient() {
  is_watched_ = true;
  torch::autograd::impl::materialize_autograd_meta(sharded_param_);
  torch::autograd::impl::set_post_acc_grad_hooks(sharded_param_, std::make_unique<GradientWatch>(self_));
}

/// A hook may look at other parameters of its group, on their modules too, and step them.
void ShownParam::run_hooks_in_backward() {
  if (const auto user = user_.lock()) user->before_hook();
  const bool is_shown = sharded_param_.grad().unsafeGetTensorImpl() == shown_gradient_ && shows_our_gradient();
  if (const auto found = find_param(sharded_param_); found && !is_shown)
    for (const auto& param : found->group->params())
      if (const auto shown = param.has_moved_away ? nullptr : find(param.sharded_param())) shown->show_gradient();
  run_hooks();
  take_over_gradient();
}

/// Those of `register_post_accumulate_grad_hook` on the DTensor, which autograd does not accumulate into.
void ShownParam::run_hooks() {
  const auto hooks = py::getattr(sharded_.get(), "_post_accumulate_grad_hooks", py::none());
  if (hooks.is_none()) return;
  for (const auto& hook : py::list(hooks.attr("values")())) hook(sharded_.object());
}

/// What stands in the table now: `_apply` swaps the tensor behind the parameter, or puts another parameter there.
PyObject* ShownParam::entry() const {
  const auto& first = places_.front();
  PyObject* now = PyDict_GetItemWithError(first.table.get(), first.key.get());
  if (now == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return now;
}

void ShownParam::check_applied() const {
  PyObject* now = entry();
  if (now == nullptr || !THPVariable_Check(now) || !is_dtensor(now))
    throw py::type_error("parameter '" + places_.front().place.name +
                         "' of a sharded module has been replaced by what is no DTensor; load values with "
                         "load_state_dict(..., assign=False), or DTensors like those of its own state_dict()");
}

/// What is set and shown counts; the gradient that `_apply` puts in the place of it ends it, and is not the user's doing.
void ShownParam::before_apply() {
  take_over_grad_dtype();
  take_over_gradient();
  gradient_ = nullptr;
}

at::Tensor ShownParam::applied_local() {
  if (PyObject* now = entry(); now != sharded_.get()) {
    take_over_grad_dtype();  // of the one that goes
    sharded_ = PyRef(py::reinterpret_borrow<py::object>(now));
    for (const auto& held : places_) put(held, sharded_);
  }
  take_over_grad_dtype();
  return tensor_of(sharded_.object().attr("_local_tensor"));
}

bool ShownParam::is_replaced() const {
  PyObject* now = entry();
  if (now == nullptr || now == Py_None || !THPVariable_Check(now)) return false;
  // `_apply` on a module below swaps the tensor behind the same object.
  if (now == sharded_.get()) return !tensor_of(sharded_.object().attr("_local_tensor")).is_alias_of(sharded_param_);
  // A DTensor parameter: torch.func.functional_call puts other tensors there for the length of a call.
  const py::handle parameter(now);
  return is_dtensor(parameter) && py::bool_(parameter.attr("_is_param"));
}

void ShownParam::point_home() {
  // An ordinary tensor, which operators inside forward do not take for the whole, and an optimizer's need not
  // be looked at; with the same memory and version counter, so that its writes are seen.
  py::object local = py::cast(plain_view(sharded_param_));
  check(PyObject_SetAttr(sharded_.get(), local_tensor_name(), local.ptr()));
  stand_in(sharded_);  // `_apply` may have put another tensor behind the parameter
  home_ = sharded_param_.storage().unsafeGetStorageImpl();
  drop_post_forward();  // the unsharded parameter may have got another dtype or device
  // The gradient goes with the parameter, unless the user has dropped it since it was shown.
  const auto& shown = THPVariable_Unpack(sharded_.get());
  const bool was_shown = shown_gradient_ != nullptr;
  forget_gradient();
  if (!was_shown) return;
  if (!shown.grad().defined()) sharded_param_.mutable_grad().reset();
  if (sharded_param_.grad().defined())
    put_gradient(sharded_param_.grad());
  else
    shown.mutable_grad().reset();
}

void ShownParam::follow_home() {
  if (sharded_param_.storage().unsafeGetStorageImpl() != home_) point_home();
}

}  // namespace fsdp::python
