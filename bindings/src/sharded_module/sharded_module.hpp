#pragma once

#include <memory>
#include <vector>

#include "fsdp/fully_shard.hpp"
#include "mirror.hpp"
#include "module/handles.hpp"
#include "module/state/module_state.hpp"
#include "root/module_pass.hpp"
#include "sharded_module/apply_call.hpp"
#include "sharded_module/boundary_casts.hpp"
#include "sharded_module/params_view.hpp"
#include "sharded_module/post_optim_event.hpp"
#include "shown/shown_params.hpp"

namespace fsdp::python {

/// A call of fully_shard in Python: the core's state, the parameters as Python shows them, and the hooks
/// around forward. Several modules of one call share it. What its modules show, and when, the core says (ModulePass).
///
/// Every public function is called with the interpreter's lock and gives it up while the core works, which
/// may wait for other ranks.
class ShardedModule final : public ParamUser, public std::enable_shared_from_this<ShardedModule> {
 public:
  ShardedModule(FSDPModule controls, std::vector<std::shared_ptr<Mirror>> modules, BoundaryCasts casts);
  ~ShardedModule() override;

  /// The core tells it of steps from now on.
  void attach();
  /// The groups' parameters have changed: after fully_shard, also of a module around this one.
  void find_params();
  FSDPModule& controls() { return controls_; }
  static std::shared_ptr<ShardedModule> of(const ModuleState& state);
  /// As the core sees them.
  const std::vector<std::shared_ptr<Mirror>>& modules() const { return view_->modules(); }
  const BoundaryCasts& casts() const { return casts_; }
  ShownParams& params() const { return view_->params(); }

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
  void set_post_forward_mesh(PostForwardMesh mesh);

  // --- ParamUser
  void before_use(Use use) override;
  bool casts_inputs() const override { return casts_.inputs.has_value(); }

 private:
  ModulePass& pass() const { return *handles::state(controls_).pass(); }
  bool run_with_full_parameters(const py::tuple& args) const;
  void enter(size_t index, bool records_autograd);
  void leave();
  void watch_backward(const py::object& output);
  py::object cast_output(py::object output) const;
  void tell(ShowsEvent event);
  bool records_autograd(const py::tuple& args) const;
  RootContext& context() const { return *handles::state(controls_).context(); }

  FSDPModule controls_;
  std::shared_ptr<ParamsView> view_;
  BoundaryCasts casts_;
  ApplyCall apply_;
  PostOptimEvent post_optim_event_;
};

}  // namespace fsdp::python
