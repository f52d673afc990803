#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/fsdp_module.hpp"
#include "module/state/module_precision.hpp"
#include "module/state/owned_group.hpp"
#include "module/state/shard_request.hpp"
#include "module/state/tie_ledger.hpp"
#include "module/state/tree_position.hpp"
#include "module/state/tree_watch.hpp"
#include "root/group_port.hpp"
#include "root/module_pass.hpp"

namespace fsdp {

struct NestedState;

/// What `fully_shard` attaches to a module (or to a list of modules that share a group). It does
/// not keep the module or the group alive; the group keeps it. Found through module_table.hpp.
class ModuleState final : public GroupHolder, public std::enable_shared_from_this<ModuleState> {
 public:
  /// What the group was made for; null before it is attached.
  static std::shared_ptr<ModuleState> of(const ParamGroup& group) {
    return std::static_pointer_cast<ModuleState>(GroupPort::of(group).holder());
  }

  /// context: a root of its own, which has the groups already.
  ModuleState(ShardRequest request, std::vector<Unit> units, std::vector<OwnedGroup> groups,
              std::vector<SharedEntry> shared, std::shared_ptr<RootContext> context);

  const ShardRequest& request() const { return request_; }
  const TreePosition& tree() const { return tree_; }
  const std::vector<OwnedGroup>& groups() const { return groups_; }
  /// Its own groups that are alive.
  std::vector<std::shared_ptr<ParamGroup>> live_groups() const { return fsdp::live_groups(groups_); }
  TieLedger& ties() { return ties_; }
  ModulePrecision& precision() { return precision_; }
  const std::shared_ptr<RootContext>& context() const { return context_; }
  /// Null where no hooks around forward tell of its modules.
  const std::shared_ptr<ModulePass>& pass() const { return pass_; }
  void set_pass(std::shared_ptr<ModulePass> pass);
  TreeWatch& watch() { return watch_; }

  std::shared_ptr<ModuleState> root();
  /// This state and all below it, in depth-first order.
  void visit(const std::function<void(ModuleState&)>& visitor);

  /// Another reshard_after_forward; makes groups of ranks for an integer that has none yet (a collective call). Throws
  /// UsageError with nothing changed.
  void set_reshard_after_forward(ReshardAfterForward request);

  // --- a module around has been sharded
  /// Puts the tree of a state that the walk met below this one.
  void adopt(const NestedState& found);
  /// Forgets the parameters that the new one has taken over.
  void forget_settled_ties();
  /// After this state became the outermost one: names, numbering and context of all below it.
  void take_root();

  // --- more was registered below the module later
  /// Attached, and in its modules' tables.
  void add_groups(std::vector<OwnedGroup> groups);
  /// An entry that holds parameter `entry.param` of one of its groups now.
  void add_registration(const ParamGroup& group, Registration entry);

 private:
  int number(int next, const std::string& above);
  void give_pass_groups() const;
  void rename_groups(const std::string& above, int enter, int exit) const;

  ShardRequest request_;
  std::vector<OwnedGroup> groups_;
  TieLedger ties_;
  std::shared_ptr<RootContext> context_;
  ModulePrecision precision_;
  TreePosition tree_;
  TreeWatch watch_;
  std::shared_ptr<ModulePass> pass_;
};

}  // namespace fsdp
