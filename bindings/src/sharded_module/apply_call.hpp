#pragma once

#include <vector>

#include "sharded_module/applied_params.hpp"

namespace fsdp::python {

/// `nn.Module._apply` (to, cpu, half...) under way on the modules of one call. It goes from parameter to parameter and swaps
/// the tensor behind each; the groups follow when all are there. Whatever is raised on the way, parameters and gradients are
/// what they were.
///
/// Gradients do not go through it, as they would lose a grad_dtype and fail: they are aside, and follow their groups, or what
/// the same function makes of them.
///
/// Every function needs the interpreter's lock.
class ApplyCall {
 public:
  /// Sharded parameters are shown. Inside another of the same call nothing but the outermost counts.
  void begin(const ShownParams& params);
  /// function: what `_apply` was called with, `of`: the parameters that it was called for; None: no gradient goes through it.
  void end(const Groups& groups, const ShownParams& params, const py::object& function, const py::object& of);
  /// Puts parameters and gradients back after an exception, also one of `end`. Inside another of the same call it leaves that
  /// to the outermost.
  void give_up(const ShownParams& params);

 private:
  std::vector<PyRef> subclasses_;  // by parameter: the local tensor of one that holds a subclass; else null
  int depth_ = 0;
};

}  // namespace fsdp::python
