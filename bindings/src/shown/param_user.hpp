#pragma once

namespace fsdp::python {

/// Who uses a parameter in operators: the module that it was sharded with.
class ParamUser {
 public:
  virtual ~ParamUser() = default;
  enum class Use { kOperator, kAll };
  /// An operator outside forward is to have the parameter. kAll: all of the module's parameters are to be as users have left
  /// them. The DTensors that these have put in their places since the last look are the parameters from now on, as at the
  /// root's next forward, if no step is under way. Throws what that throws.
  virtual void before_use(Use use) = 0;
  virtual bool casts_inputs() const = 0;
};

}  // namespace fsdp::python
