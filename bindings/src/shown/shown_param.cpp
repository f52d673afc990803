#include "shown/shown_param.hpp"

#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "root/find_param.hpp"
#include "shown/gradient_hooks.hpp"
#include "shown/param_stand_in.hpp"
#include "shown/shown_registry.hpp"

namespace fsdp::python {

ShownParam::ShownParam(at::Tensor local_tensor, py::object sharded, py::object unsharded,
                       std::unique_ptr<ComputeHandle> handle, const DTensorMaker& maker)
    : sharded_(std::move(local_tensor), std::move(sharded)),
      forms_(sharded_, std::move(unsharded), std::move(handle)),
      gradient_(sharded_, forms_.entries(), maker),
      maker_(maker) {}

std::shared_ptr<ShownParam> ShownParam::make(at::Tensor local_tensor, py::object sharded, py::object unsharded,
                                             std::unique_ptr<ComputeHandle> handle, const DTensorMaker& maker) {
  const std::shared_ptr<ShownParam> made(new ShownParam(std::move(local_tensor), std::move(sharded),
                                                        std::move(unsharded), std::move(handle), maker));
  shown_registry().add(made);
  made->gradient_.set_self(std::shared_ptr<ShownGradient>(made, &made->gradient_));
  made->stand_in(made->sharded_.parameter());
  return made;
}

ShownParam::~ShownParam() {
  py::gil_scoped_acquire gil;
  shown_registry().remove(*this);
}

void ShownParam::stand_in(const PyRef& dtensor) {
  if (forms_.computes_with_handle()) return;  // its operators have DTensors beside it
  stand_in_for(*this, dtensor);
}

void ShownParam::gather_by_hooks(std::unique_ptr<ComputeHandle> handle) {
  sharded_.note_hooks();
  forms_.compute_with(std::move(handle));
}

void ShownParam::add_place(const PyEntry& place) {
  forms_.add_place(place);
  shown_registry().add(place, *this);
}

void ShownParam::show_post_forward(const PostForwardMesh& mesh) {
  const auto param = find_param(sharded_.local_tensor());
  const bool is_cut = param && !param->param().spec.sizes().empty();
  if (!is_cut || forms_.computes_with_handle()) return forms_.show_sharded();
  if (!forms_.post_forward()) {
    forms_.make_post_forward(param->param(), mesh, maker_);
    stand_in(forms_.post_forward());
  }
  forms_.show_post_forward();
}

void ShownParam::replace_sharded(py::object dtensor) {
  sharded_.replace(std::move(dtensor));
  forms_.entries().put_over(sharded_.parameter(), [](const PyObject* now) { return now != nullptr && now != Py_None; });
  gradient_.follow_replaced();
}

void ShownParam::settle_tie(bool is_tied) {
  if (is_tied_ && !is_tied) {
    // The DTensor may show the other's memory.
    sharded_.take_over_values();
    point_home();
  }
  is_tied_ = is_tied;
}

/// Amid a backward only what has been written since the forward, or autograd would refuse what that has saved.
void ShownParam::take_over_tied_values() {
  const auto version = static_cast<int64_t>(sharded_.local()._version());
  const bool is_in_backward = torch::autograd::get_current_graph_task_id() != -1;
  if (version != std::exchange(seen_tied_version_, version) || !is_in_backward) sharded_.take_over_values();
}

void ShownParam::set_data(const at::Tensor& data) {
  const auto values = sharded_.values_in(data, forms_.entries().name());
  if (values.is_alias_of(sharded_.local_tensor())) return;
  sharded_.show_values(values);  // not the old memory, which nobody else may know
  const auto home = c10::make_scope_exit([this] { point_home(); });
  at::Tensor(sharded_.local_tensor()).set_data(values);
}

void ShownParam::take_over() {
  if (is_tied_) take_over_tied_values();
  sharded_.take_over_requires_grad();
  sharded_.take_over_grad_dtype();
  take_over_hooks();
  gradient_.take_over();
}

void ShownParam::take_over_hooks() {
  if (runs_hooks_in_backward_ || !has_gradient_hooks(sharded_)) return;
  runs_hooks_in_backward_ = true;
  run_gradient_hooks_in_backward(*this);
}

void ShownParam::show_gradient() {
  sharded_.show_requires_grad();
  if (gradient_.show() && !runs_hooks_in_backward_ && has_gradient_hooks(sharded_)) run_gradient_hooks(sharded_);
}

void ShownParam::point_home() {
  sharded_.point_home();
  stand_in(sharded_.parameter());  // `_apply` may have put another tensor behind the parameter
  forms_.drop_post_forward();      // the unsharded parameter may have got another dtype or device
  gradient_.bring_back();
  gradient_.follow_home();
}

}  // namespace fsdp::python
