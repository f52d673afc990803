#pragma once

#include <functional>
#include <string>

namespace fsdp {

/// full_precision_in_eval of one group: whether its unsharded parameters are in their own dtype, or in the policy's.
class EvalPrecision {
 public:
  bool is_own_dtype() const { return is_own_dtype_; }
  void set_own_dtype(bool value) { is_own_dtype_ = value; }
  /// asks: what the mode of the module, now, wants. Never called where the policy does not ask for it.
  void follow(std::function<bool()> asks) { asks_ = std::move(asks); }
  /// Throws StateError if the module's mode has changed since the step began.
  void check(const std::string& group) const;

 private:
  std::function<bool()> asks_;  // empty: the policy does not ask for it
  bool is_own_dtype_ = false;
};

}  // namespace fsdp
