#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <utility>

namespace fsdp::python {

/// False at its end, when nothing can be given back any more, and a thread that asks for its lock is ended.
inline bool is_interpreter_alive() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() != 0 && Py_IsFinalizing() == 0;
#else
  return Py_IsInitialized() != 0 && _Py_IsFinalizing() == 0;
#endif
}

/// Whether this thread has the interpreter's lock. PyGILState_Check says yes everywhere once there has been a subinterpreter.
inline bool has_interpreter_lock() {
  PyThreadState* const current = py::detail::get_thread_state_unchecked();
  return current != nullptr && current == PyGILState_GetThisThreadState();
}

/// The interpreter's lock, while it lives. Next to nothing where this thread has it already.
class InterpreterLock {
 public:
  InterpreterLock() {
    if (!has_interpreter_lock()) taken_.emplace();
  }
  InterpreterLock(const InterpreterLock&) = delete;
  InterpreterLock& operator=(const InterpreterLock&) = delete;

 private:
  std::optional<py::gil_scoped_acquire> taken_;
};

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
    if (object_ == nullptr || !is_interpreter_alive()) return;
    const InterpreterLock lock;
    Py_DECREF(object_);
  }

  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }
  py::object object() const { return py::reinterpret_borrow<py::object>(object_); }

 private:
  PyObject* object_ = nullptr;
};

/// A level of a recursion over what Python gives. RecursionError where Python would have it for its own functions:
/// values may be nested without end.
class RecursionLevel {
 public:
  /// where: what is under way, as in " while looking for tensors".
  explicit RecursionLevel(const char* where) {
    if (Py_EnterRecursiveCall(where) != 0) throw py::error_already_set();
  }
  ~RecursionLevel() { Py_LeaveRecursiveCall(); }
  RecursionLevel(const RecursionLevel&) = delete;
  RecursionLevel& operator=(const RecursionLevel&) = delete;
};

/// The tensor that a Python object stands for; undefined for None. Needs the interpreter's lock.
at::Tensor tensor_of(py::handle object);
/// Throws Python's error where a function of its C interface has failed.
inline void check_status(int status) {
  if (status != 0) throw py::error_already_set();
}
/// The name that an entry of a module's table has; TypeError if it is no string.
std::string name_of(py::handle key);

/// The class's objects come from its functions alone: no object without a C++ one behind it, which pybind11
/// would invent, from memory that nobody has written.
template <class Class>
Class& not_made_by_python(Class& defined) {
  reinterpret_cast<PyTypeObject*>(defined.ptr())->tp_new = nullptr;
  return defined;
}

/// Holders may be null: Python's None.
template <class Pointer>
const Pointer& present(const Pointer& pointer, const char* expected) {
  if (!pointer) throw py::type_error(std::string("expected ") + expected + ", found None");
  return pointer;
}

}  // namespace fsdp::python
