#pragma once

#include <ATen/core/Tensor.h>

#include "py_ref.hpp"

namespace fsdp::python {

/// How DTensors are made and read; functions of the Python side, as DTensor's constructor is.
struct DTensorMaker {
  py::object dtensor;         ///< the class
  py::object construct;       ///< its `__new__`: (class, local, spec, requires_grad) -> DTensor
  py::object in_dtype;        ///< (spec, dtype) -> spec
  py::object make_unsharded;  ///< (local, like: the parameter's DTensor or annotation, requires_grad) -> nn.Parameter
  /// (local, mesh, dimension that is cut, (sizes, strides) of the whole, requires_grad) -> nn.Parameter
  py::object make_post_forward;
  /// (gradient: a DTensor, placements) -> the local tensor of it placed so; None among them: as it comes. Or (gradient: a
  /// plain tensor, the annotation of its parameter).
  py::object local_gradient;
  py::object replicates_ordinary;  ///< () -> bool: DTensor takes ordinary tensors as replicated at the moment
};

/// A DTensor over `local`, as the DTensor `like` but for the dtype. It needs no gradient.
py::object dtensor_like(const DTensorMaker& maker, const at::Tensor& local, py::handle like);
/// spec: like's, in the dtype of `local`.
py::object dtensor_like(const DTensorMaker& maker, const at::Tensor& local, py::handle like, py::handle spec);
py::object spec_of(py::handle dtensor);

/// An nn.Parameter, of whatever class of tensors; not for null, None and what is no tensor.
bool is_parameter(PyObject* object);
/// Returns whether it is a DTensor. tensor: a tensor, and nothing else.
bool is_dtensor(py::handle tensor);
at::Tensor local_tensor_of(py::handle dtensor);
/// A tensor of a class of its own that says itself how it is gathered (fsdp_pre_all_gather), or has to before it is.
bool is_gathered_by_hooks(py::handle tensor);
/// It shows the memory of `local` from now on.
void set_local_tensor(py::handle dtensor, const at::Tensor& local);

}  // namespace fsdp::python
