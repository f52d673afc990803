#pragma once

#include "schedule/shows.hpp"

namespace fsdp {

class ParamGroup;

/// What a root calls around its steps: on the thread that runs the step, under the root's lock. It starts no operator on an
/// unsharded parameter.
class StepHooks {
 public:
  virtual ~StepHooks() = default;

  /// Between steps, before a step or a read: groups take the dtype that their modules' mode (train, eval) asks for.
  virtual void follow_modes() {}
  /// A forward uses the group, which follows its modules' mode. Throws StateError if that has changed since the step began.
  virtual void check_mode(const ParamGroup&) {}
  /// A step begins, or a forward in it anew: what only the module tree shows (replaced entries). May throw; the step has not
  /// begun then.
  virtual void check_modules() {}
  /// A step, or a backward, begins: what the user has changed since on parameters that modules show in forms of their own
  /// (gradients dropped, requires_grad) is to be on the sharded parameters when this returns. May throw, as above.
  virtual void take_over() {}
  /// A backward, a step or a scope has ended, well or not (kStepEnds), or has been given up. Gradients are on the sharded
  /// parameters unless their reduction is still under way.
  virtual void show(ShowsEvent) {}
  /// A user's hook on a gradient of the group is about to run.
  virtual void show_for_hook(const ParamGroup&) {}
  /// Takes what users have put in the place of parameters, outside a step, before the root's first use. May throw; it is to be
  /// called again then.
  virtual void begin() {}
  /// Forgets the forwards that modules have begun and not ended. Returns how many scopes these have opened.
  virtual size_t give_up_forwards() { return 0; }
};

}  // namespace fsdp
