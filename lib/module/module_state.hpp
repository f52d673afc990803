#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "fsdp/fsdp_module.hpp"
#include "fsdp/fully_shard_options.hpp"
#include "group/param_group.hpp"
#include "mesh/mesh_info.hpp"
#include "root/group_port.hpp"

namespace fsdp {

/// One of the modules that share a state.
struct Unit {
  const torch::nn::Module* module;  ///< only compared: it may be gone
  std::string path;                 ///< from the parent's module; "" without a parent
  std::weak_ptr<const torch::nn::Module> alive = {};  ///< for a module that a shared_ptr owns
};

/// One entry of a module's parameter table that a group's parameter took over.
struct Registration {
  torch::nn::Module* module;
  std::weak_ptr<torch::nn::Module> alive;
  bool is_shared;  ///< false: no shared_ptr owns the module (it is on the stack, say)
  std::string key;
  size_t slot;   ///< position in the table
  size_t param;  ///< index in the group
};

/// The entry at `slot`; its `param` is to be set.
Registration registration_at(torch::nn::Module& module, size_t slot);

/// A parameter of a group, as the module tree knows it.
struct OwnedParam {
  std::string name;  ///< relative to its unit
  size_t unit;       ///< which of the modules that share the state
};

/// One of a state's groups, with what only the module tree knows of it. It does not keep the group alive.
struct OwnedGroup {
  std::weak_ptr<ParamGroup> group;
  MeshInfo mesh_info = {};
  std::string suffix = {};                        ///< of its name, behind the module's
  std::vector<OwnedParam> params = {};            ///< by index in the group
  std::vector<Registration> registrations = {};   ///< entries that hold a sharded parameter
  std::optional<ReshardPlan> integer_plan = {};   ///< groups of ranks made when an integer was asked for
};

/// An entry of a module's parameter table that holds the unsharded parameter of another state's parameter: a tie across
/// groups that no module around both has settled yet (S6).
struct SharedEntry {
  Registration place;  ///< its `param` means nothing
  std::string name;    ///< relative to its unit
  size_t unit = 0;
  std::weak_ptr<ParamGroup> owner;
  /// Undefined where the module is gone.
  at::Tensor unsharded_param() const;
};

/// A buffer in another dtype than its module gave it (MixedPrecisionPolicy::buffer_dtype).
struct CastBuffer {
  explicit CastBuffer(const at::Tensor& tensor)
      : buffer(tensor.getIntrusivePtr()), dtype(tensor.scalar_type()) {}
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> buffer;
  at::ScalarType dtype;  ///< its own: what it is saved in
};

/// What `fully_shard` attaches to a module (or to a list of modules that share a group). It does
/// not keep the module or the group alive; the group keeps it. Found through module_table.hpp.
class ModuleState : public std::enable_shared_from_this<ModuleState> {
 public:
  std::vector<Unit> units;  ///< in the order given to fully_shard
  std::string name;         ///< path from the root; "" for the root itself
  std::string description;  ///< for messages: the name, or "the root module"
  MeshInfo mesh_info;       ///< of the mesh that fully_shard was given
  ReshardAfterForward requested_reshard;
  MixedPrecisionPolicy mp_policy;
  FullyShardOptions options;  ///< as given, without what was ignored or replicated
  std::vector<std::weak_ptr<torch::nn::Module>> ignored_modules;  ///< as given
  std::vector<OwnedGroup> groups;  ///< none if there was nothing to shard; one for each mesh
  std::vector<SharedEntry> shared_entries;  ///< settled when a module around both is sharded
  std::vector<std::weak_ptr<ModuleState>> sharers;  ///< states that have such entries of this one's parameters
  std::shared_ptr<RootContext> context;
  std::vector<CastBuffer> cast_buffers;
  std::unordered_set<const c10::TensorImpl*> ignored;  ///< its own and what it inherited
  std::weak_ptr<ModuleState> parent;
  std::vector<std::shared_ptr<ModuleState>> nested;    ///< directly below, in depth-first order

  /// full_precision_in_eval, and its modules were in eval mode when the last step or read began.
  bool computes_in_own_dtype = false;

  bool is_root() const { return parent.expired(); }
  std::shared_ptr<ModuleState> root();
  /// Its own groups that are alive.
  std::vector<std::shared_ptr<ParamGroup>> live_groups() const;
  /// A group of this state, or of one below it, is alive.
  bool has_group_below();
  /// This state and all below it, in depth-first order.
  void visit(const std::function<void(ModuleState&)>& visitor);

  /// What an unset, boolean or integer reshard_after_forward comes to on a mesh; makes groups for an integer
  /// that has none yet (a collective call). Throws UsageError (M4) with nothing changed.
  ReshardPlan plan_reshard(ReshardAfterForward request, const MeshInfo& info) const;
  /// Throws UsageError if an integer does not fit every group's mesh. No communication.
  void check_reshard(ReshardAfterForward request) const;
  void apply_reshard_policy();

  /// After this state became the outermost one: names, numbering and context of all below it.
  void take_root();

  /// full_precision_in_eval: what the modules' modes ask for now.
  bool wants_own_dtype() const;
  void follow_mode();

  /// Throws StateError if an entry of a parameter table no longer holds its sharded parameter, or if a
  /// tie across groups has not been settled.
  void check_registrations();

 private:
  int number(int next, const std::string& prefix);
  void check_ties() const;
  static void check_entries(const std::vector<Registration>& entries, const ParamGroup& group);
};

}  // namespace fsdp
