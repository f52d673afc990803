#pragma once

#include <memory>
#include <vector>

#include "fsdp/fully_shard.hpp"
#include "mirror.hpp"
#include "module/handles.hpp"
#include "module/state/module_state.hpp"
#include "sharded_module/apply_call.hpp"
#include "sharded_module/boundary_casts.hpp"
#include "sharded_module/forward_passes.hpp"
#include "sharded_module/post_optim_event.hpp"
#include "sharded_module/root_follower.hpp"
#include "shown/shown_params.hpp"

namespace fsdp::python {

/// A call of fully_shard in Python: the core's state, the parameters as Python shows them, and the hooks
/// around forward. Several modules of one call share it.
///
/// Every public function is called with the interpreter's lock and gives it up while the core works, which
/// may wait for other ranks.
class ShardedModule final : public ParamUser, public std::enable_shared_from_this<ShardedModule> {
 public:
  ShardedModule(FSDPModule controls, std::vector<std::shared_ptr<Mirror>> modules, BoundaryCasts casts);
  ~ShardedModule() override;

  /// The groups' parameters have changed: after fully_shard, also of a module around this one.
  void find_params();
  FSDPModule& controls() { return controls_; }
  static std::shared_ptr<ShardedModule> of(const ModuleState& state);
  /// As the core sees them.
  const std::vector<std::shared_ptr<Mirror>>& modules() const { return modules_; }
  const BoundaryCasts& casts() const { return casts_; }
  ShownParams& params() { return params_; }

  /// The hook before the forward of module `index`. Returns (args, kwargs), or None where nothing changes.
  py::object pre_forward(size_t index, py::tuple args, py::dict kwargs);
  /// The hook behind the forward of module `index`, which also comes after an exception, with None then: of the hook before it
  /// too, or where a user's hook raised in front of that.
  py::object post_forward(size_t index, py::object output);

  void unshard();
  void unshard_done();
  void reshard();
  /// Begins `apply`. Throws StateError inside FullParameters.
  void before_apply();
  /// nn.Module._apply that is under way.
  ApplyCall& apply() { return apply_; }
  void reset_iter_state();
  /// The root's next forward waits for it first; None: for nothing.
  void set_post_optim_event(py::object event);
  /// Outside forward: parameters that are gathered and stay show unsharded, others sharded; and all their gradients.
  void show_what_is_kept();

  // --- ParamUser
  void before_use(Use use) override;
  void before_hook() override;
  bool casts_inputs() const override { return casts_.inputs.has_value(); }

 private:
  using Form = ShownParams::Form;
  void follow_root();
  /// Before the first use of the root.
  void begin();
  void take_replaced();
  bool is_kept() const;
  bool run_with_full_parameters(const py::tuple& args) const;
  bool reshards_after_forward() const;
  void watch_backward(const py::object& output);
  void use(bool records_autograd);
  void gather_in_backward();
  bool records_autograd(const py::tuple& args) const;
  RootContext& context() const { return *handles::state(controls_).context(); }

  FSDPModule controls_;
  std::vector<std::shared_ptr<Mirror>> modules_;
  BoundaryCasts casts_;
  ShownParams params_;
  ApplyCall apply_;
  std::shared_ptr<RootFollower> follower_;  ///< a root's
  const RootContext* followed_ = nullptr;   ///< of the root when it was last looked for
  PostOptimEvent post_optim_event_;
  bool has_begun_ = false;
  ForwardPasses passes_;
};

}  // namespace fsdp::python
