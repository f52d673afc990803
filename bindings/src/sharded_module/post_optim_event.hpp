#pragma once

#include "py_ref.hpp"
#include "root/root_context.hpp"

namespace fsdp::python {

/// Recorded behind an optimizer's step: the root's next forward waits for it first. An event that Python made has no form that
/// C++ can wait for, so it is Python that lets streams wait.
class PostOptimEvent {
 public:
  PostOptimEvent() = default;
  /// None: nothing to wait for. Throws TypeError for what has no `wait`.
  explicit PostOptimEvent(py::object event);

  bool is_set() const { return static_cast<bool>(event_); }
  /// Gathers on `device` wait for it, until the first use of a parameter, if the device has streams. It is forgotten then.
  void wait(RootContext& context, c10::Device device);

 private:
  PyRef event_;
};

}  // namespace fsdp::python
