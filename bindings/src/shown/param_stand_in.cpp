#include "shown/param_stand_in.hpp"

#include <torch/csrc/Exceptions.h>

#include "dispatch/stand_in/stand_in.hpp"
#include "dispatch/param_storage.hpp"
#include "root/find_param.hpp"

namespace fsdp::python {

namespace {

class ParamStandIn final : public StandIn {
 public:
  explicit ParamStandIn(ShownParam& param)
      : shown_(param.weak_from_this()), is_scalar_(tensor_of(param.forms().unsharded().get()).dim() == 0) {}

  at::Tensor ordinary() override {
    py::gil_scoped_acquire gil;
    const auto shown = shown_.lock();
    const auto user = shown && shows_mine(*shown) ? shown->user() : nullptr;
    // In DTensor's own mode for it, ordinary tensors are replicated ones.
    if (!user || shown->maker().replicates_ordinary().cast<bool>()) return {};
    if (shown->forms().computes_with_handle()) return {};  // since it has hooks
    user->before_use(ParamUser::Use::kOperator);
    shown->sharded().follow_requires_grad();
    return THPVariable_Unpack(shown->forms().unsharded().get());
  }
  at::Tensor leaf() override {
    py::gil_scoped_acquire gil;
    const auto shown = shown_.lock();
    return shown ? THPVariable_Unpack(shown->forms().unsharded().get()) : at::Tensor();
  }
  int64_t version() const override {
    const auto shown = shown_.lock();
    const auto found = shown ? find_param(shown->sharded().local_tensor()) : std::nullopt;
    return found ? found->param().sharded.version() : 0;
  }
  bool is_of_scalar() const override { return is_scalar_ && !shown_.expired(); }
  void note_write() override {
    const auto* storage = written();
    if (storage == nullptr) return;
    shown_.lock()->sharded().local_tensor().unsafeGetTensorImpl()->bump_version();
    storage->owner()->note_write(storage->index());
  }
  void note_data_write() override {
    if (const auto* storage = written()) storage->owner()->note_write(storage->index());
  }
  bool casts_operands() const override {
    const auto shown = shown_.lock();
    const auto user = shown ? shown->user() : nullptr;
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
  /// Null where nobody is to be told.
  const ParamStorage* written() const {
    const auto shown = shown_.lock();
    const auto* storage =
        shown && shows_mine(*shown) ? ParamStorage::of(shown->sharded().local_tensor().unsafeGetTensorImpl()) : nullptr;
    return storage != nullptr && storage->owner() != nullptr ? storage : nullptr;
  }
  /// False once a user has put another DTensor in the place of this one, which is a tensor by itself then.
  bool shows_mine(const ShownParam& shown) const {
    const auto& post_forward = shown.forms().post_forward();
    return is_of(shown.sharded().tensor().unsafeGetTensorImpl()) ||
           (post_forward && is_of(THPVariable_Unpack(post_forward.get()).unsafeGetTensorImpl()));
  }

  std::weak_ptr<ShownParam> shown_;
  bool is_scalar_;
};

}  // namespace

void stand_in_for(ShownParam& param, const PyRef& dtensor) {
  make_stand_in(THPVariable_Unpack(dtensor.get()), c10::make_intrusive<ParamStandIn>(param));
}

}  // namespace fsdp::python
