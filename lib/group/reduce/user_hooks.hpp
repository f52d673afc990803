#pragma once

namespace fsdp {

class ParamGroup;

/// Who is told that a user's hook runs in the middle of a reduction: what the hook reads is gathered for it and released
/// behind it.
class UserHooks {
 public:
  /// group: whose gradient it is for.
  virtual void begin_user_hook(const ParamGroup& group) = 0;
  virtual void end_user_hook() noexcept = 0;

 protected:
  ~UserHooks() = default;
};

}  // namespace fsdp
