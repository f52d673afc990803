#pragma once

namespace fsdp::python {

/// Who uses a parameter in operators: the module that it was sharded with.
class ParamUser {
 public:
  virtual ~ParamUser() = default;
  /// An operator outside forward is to have the parameter.
  virtual void before_use() = 0;
  /// A hook behind a gradient is about to run, amid backward.
  virtual void before_hook() = 0;
  virtual bool casts_inputs() const = 0;
};

}  // namespace fsdp::python
