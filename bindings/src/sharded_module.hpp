#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "fsdp/fully_shard.hpp"
#include "module/state/module_state.hpp"
#include "root/step_follower.hpp"
#include "shown_param.hpp"

namespace fsdp::python {

/// What happens at the boundary of a module's forward beside the core's work (T8).
struct BoundaryCasts {
  std::optional<at::ScalarType> inputs, outputs;
  py::object apply;  ///< torch's own walk through nested containers: (function, value) -> value
};

/// A call of fully_shard in Python: the core's state, the parameters as Python shows them, and the hooks
/// around forward. Several modules of one call share it. The root's also follows the steps.
///
/// Every public function is called with the interpreter's lock and gives it up while the core works, which
/// may wait for other ranks; `take_over` and `show` come from the core without it.
class ShardedModule final : public StepHooks,
                            public ParamUser,
                            public std::enable_shared_from_this<ShardedModule> {
 public:
  ShardedModule(FSDPModule controls, std::vector<std::shared_ptr<Mirror>> modules, BoundaryCasts casts);
  ~ShardedModule() override;

  /// The groups' parameters have changed: after fully_shard, also of a module around this one.
  void find_params();
  FSDPModule& controls() { return controls_; }
  const FSDPModule& controls() const { return controls_; }
  static std::shared_ptr<ShardedModule> of(const ModuleState& state);
  /// The first of its modules, as the core sees it.
  const torch::nn::Module& module() const { return *modules_.front(); }
  const std::vector<std::shared_ptr<Mirror>>& modules() const { return modules_; }
  const BoundaryCasts& casts() const { return casts_; }
  const std::vector<std::shared_ptr<ShownParam>>& params() const { return params_; }

  /// The hook before the forward of module `index`. Returns (args, kwargs), or None where nothing changes.
  py::object pre_forward(size_t index, py::tuple args, py::dict kwargs);
  /// The hook behind a forward, which also comes after an exception, with None then.
  py::object post_forward(py::object output);

  /// How parameters show between a forward that releases them and its backward; no mesh: as they do outside.
  void set_post_forward_mesh(PostForwardMesh mesh);
  void unshard();
  void unshard_done();
  void reshard();
  void reset_iter_state();
  /// The root's next forward waits for it first; None: for nothing.
  void set_post_optim_event(py::object event);
  /// Before nn.Module._apply on the module: sharded parameters are shown, and what it would lose of them is taken over.
  void before_apply();
  /// After nn.Module._apply on the module: takes the parameters' new values, device or dtype over.
  void applied();

  // --- StepHooks
  void take_over() override;
  void show() override;

  // --- ParamUser
  void before_use() override { follow_root(); }
  void before_hook() override;
  bool casts_inputs() const override { return casts_.inputs.has_value(); }

 private:
  void follow_root();
  void take_replaced();
  [[noreturn]] void throw_partly_on_meta() const;
  enum class Form { kSharded, kUnsharded, kPostForward };
  void show_as(Form form);
  bool is_kept() const;
  bool reshards_after_forward() const;
  void watch_backward(const py::object& output);
  void use(bool records_autograd);
  bool records_autograd(const py::tuple& args) const;

  FSDPModule controls_;
  std::vector<std::shared_ptr<Mirror>> modules_;
  BoundaryCasts casts_;
  std::vector<std::shared_ptr<ShownParam>> params_;
  std::vector<std::weak_ptr<ShardedModule>> followed_;  ///< of a root: itself and all below
  const RootContext* context_ = nullptr;                ///< when the root was last looked for
  void wait_for_post_optim_event();
  PyRef post_optim_event_;
  bool has_begun_ = false;
  Form form_ = Form::kSharded;
  PostForwardMesh post_forward_mesh_;
  int depth_ = 0;                 ///< forwards under way
  std::vector<bool> waits_for_;   ///< by module: it has not run yet in this pass; several modules only
};

}  // namespace fsdp::python
