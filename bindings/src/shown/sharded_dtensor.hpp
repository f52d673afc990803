#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

#include "shown/dtensors.hpp"

namespace fsdp::python {

/// The DTensor that stands in modules for one sharded parameter, over its memory. What a user sets on the DTensor holds for
/// the sharded parameter: requires_grad, grad_dtype.
///
/// Every function needs the interpreter's lock.
class ShardedDTensor {
 public:
  /// dtensor: an nn.Parameter.
  ShardedDTensor(at::Tensor local_tensor, py::object dtensor);

  const at::Tensor& local_tensor() const { return local_tensor_; }
  const PyRef& parameter() const { return dtensor_; }
  py::object object() const { return dtensor_.object(); }
  const at::Tensor& tensor() const { return THPVariable_Unpack(dtensor_.get()); }
  at::Tensor local() const { return local_tensor_of(dtensor_.get()); }
  /// Another parameter stands for it from now on.
  void replace(py::object dtensor) { dtensor_ = PyRef(std::move(dtensor)); }

  void take_over_requires_grad() const;
  /// The other way.
  void show_requires_grad() const;
  /// Between steps an operator is to record what the user has just asked for; in one, the next will.
  void follow_requires_grad() const;
  /// One that was set counts; a DTensor without, which may be new, gets the sharded parameter's.
  void take_over_grad_dtype() const;

  /// Where the DTensor shows other memory, the sharded parameter gets the values from there.
  void take_over_values() const;

  /// What `data` has for the sharded parameter: this rank's rows, or the whole. TypeError, with the parameter's name, where it
  /// is neither a DTensor placed as the parameter is nor the whole.
  at::Tensor values_in(const at::Tensor& data, const std::string& name) const;
  /// The DTensor shows these until `point_home`.
  void show_values(const at::Tensor& values) const { set_local_tensor(dtensor_.get(), values); }

  /// It holds a tensor that says itself how it is gathered (fsdp_pre_all_gather): most often of a class of its own, while the
  /// sharded parameter's memory means nothing.
  bool holds_subclass() const { return holds_subclass_; }
  void note_hooks() { holds_subclass_ = true; }
  /// False if the sharded parameter lies in other memory now than when the DTensor was made or last pointed there.
  bool is_home() const { return local_tensor_.storage().unsafeGetStorageImpl() == home_; }
  /// The sharded parameter holds the values: the DTensor shows its memory.
  void point_home();

 private:
  at::Tensor local_tensor_;
  PyRef dtensor_;
  bool holds_subclass_;
  const c10::StorageImpl* home_;  ///< of the memory that the DTensor shows
};

}  // namespace fsdp::python
