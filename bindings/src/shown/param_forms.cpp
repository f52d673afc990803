#include "shown/param_forms.hpp"

#include "param/grad_dtype.hpp"
#include "tensor/shard_part.hpp"

namespace fsdp::python {

bool ParamForms::has(const at::Tensor& tensor) const {
  return tensor.is_same(sharded_.tensor()) || (computed() && tensor.is_same(THPVariable_Unpack(computed().get()))) ||
         (post_forward_ && tensor.is_same(THPVariable_Unpack(post_forward_.get()))) ||
         (full_ && tensor.is_same(THPVariable_Unpack(full_.get())));
}

void ParamForms::show(const PyRef& parameter) const {
  if (is_full()) return;
  entries_.put_over(parameter, [this](const PyObject* now) { return is_one(now); });
}

void ParamForms::show_unsharded() const {
  if (handle_ && !is_full()) handle_->follow();
  show(computed());
}

void ParamForms::show_sharded() const {
  show(sharded_.parameter());
  if (handle_) handle_->rest();
}

void ParamForms::show_full() {
  auto full = PyRef(handle_ ? handle_->over_full() : unsharded_.object());
  show(full);
  full_ = std::move(full);
}

void ParamForms::end_full() {
  full_ = PyRef();
  entries_.put(sharded_.parameter());
}

at::Tensor ParamForms::in_place_of_full() const {
  PyObject* now = entries_.now();
  if (now == nullptr || now == Py_None || now == full_.get() || !THPVariable_Check(now)) return {};
  return THPVariable_Unpack(now);
}

void ParamForms::make_post_forward(const FSDPParam& param, const PostForwardMesh& mesh, const DTensorMaker& maker) {
  const int64_t dim = param.layout().dim();
  const ShardLayout layout(param.spec.sizes(), param.spec.strides(), dim, mesh.ranks);
  // A view of the unsharded parameter, which is gathered when somebody reads it.
  const auto part = part_of(layout, tensor_of(unsharded_.object()).detach(), mesh.rank);
  const auto geometry = py::make_tuple(c10::IntArrayRef(param.spec.sizes()), c10::IntArrayRef(param.spec.strides()));
  post_forward_ = PyRef(maker.make_post_forward(part, mesh.mesh.object(), dim, geometry, param.requires_grad()));
  set_grad_dtype(tensor_of(post_forward_.object()), param.grad_dtype());
}

}  // namespace fsdp::python
