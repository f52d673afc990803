#pragma once

#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace fsdp::python {

/// A Python object that C++ holds, and may let go of without the interpreter's lock.
class PyRef {
 public:
  PyRef() = default;
  explicit PyRef(py::object object) : object_(object.release().ptr()) {}
  PyRef(PyRef&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  PyRef& operator=(PyRef&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~PyRef() {
    // At the interpreter's end nothing can be given back any more.
    if (object_ == nullptr || !Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    Py_DECREF(object_);
  }

  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }
  py::object object() const { return py::reinterpret_borrow<py::object>(object_); }

 private:
  PyObject* object_ = nullptr;
};

/// The tensor that a Python object stands for; undefined for None. Needs the interpreter's lock.
at::Tensor tensor_of(py::handle object);
/// Of a tensor.
bool is_dtensor(py::handle tensor);

}  // namespace fsdp::python
