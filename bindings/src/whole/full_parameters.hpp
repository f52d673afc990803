#pragma once

#include <memory>
#include <vector>

#include "fsdp/full_parameters.hpp"
#include "shown/shown_param.hpp"

namespace fsdp::python {

/// FullParameters as Python modules show it. Made under the interpreter's lock, which it gives up while the core works; `end`
/// takes it all back, as does the destructor.
class FullScope {
 public:
  FullScope(const py::handle& module, const FullParametersOptions& options);
  ~FullScope();
  FullScope(const FullScope&) = delete;
  FullScope& operator=(const FullScope&) = delete;

  /// Throws UsageError, with everything taken back, where the user has put in a parameter's place what is not as large.
  void end();

 private:
  std::string take_over_replaced() const;

  bool writeback_;
  std::vector<std::unique_ptr<FullParameters>> scopes_;
  std::vector<std::shared_ptr<ShownParam>> shown_;
};

void define_full_parameters(py::module_& module);

}  // namespace fsdp::python
