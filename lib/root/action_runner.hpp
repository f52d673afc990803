#pragma once

#include <vector>

#include "group/comm_context.hpp"
#include "group/param_group.hpp"
#include "root/ready_groups.hpp"
#include "root/reduction_queue.hpp"
#include "schedule/scheduler.hpp"
#include "schedule/step_machine.hpp"

namespace fsdp {

/// The groups of one root, and the hands of its scheduler: gives it events and does the actions that it answers with.
///
/// Not thread-safe: the root's lock guards it.
class ActionRunner {
 public:
  /// hooks: who is told of users' hooks on gradients. All outlive this.
  ActionRunner(RootMutex& mutex, const StepMachine& step, UserHooks& hooks)
      : step_(step), reductions_(mutex, comm_ctx_, scheduler_.reduce_order(), hooks) {}

  /// Takes a group over; in the order of use as far as it is known (depth-first).
  void add(ParamGroup& group);
  void remove(ParamGroup& group);
  /// Another layout, dtype, device or option has come: the scheduler is told, if that is news to it.
  void facts_changed(const ParamGroup& group);

  const std::vector<ParamGroup*>& groups() const { return comm_ctx_.groups; }
  /// Some are never gathered (one rank's), so no gather of theirs could wait for anything.
  bool has_unreleased_groups() const;
  const std::vector<ParamGroup*>& groups_by_id() const { return groups_by_id_; }  ///< null where one is gone
  ParamGroup* find(int id) const { return groups_by_id_[static_cast<size_t>(id)]; }

  /// Does them in their order. If one throws, the scheduler is told where all groups are.
  void apply(const Actions& actions);
  void tell(GroupEvent event, const ParamGroup& group) { apply(scheduler_.on(event, group.identity().id)); }
  /// So many that have waited, the oldest first.
  void start_reductions(size_t count);
  /// The group has all the gradients of this backward that it is to get.
  void on_last_gradient(ParamGroup& group);
  /// The backward is over: reduces what it has left, and what backwards before it have without synchronization.
  void reduce_left();

  Scheduler& scheduler() { return scheduler_; }
  const Scheduler& scheduler() const { return scheduler_; }
  CommContext& comm_ctx() { return comm_ctx_; }
  ReadyGroups& ready() { return ready_; }
  ReductionQueue& reductions() { return reductions_; }
  const ReductionQueue& reductions() const { return reductions_; }

 private:
  int ranks_of(const ParamGroup& group);
  std::string prefetch_name(int id) const;
  void execute(const Action& action);
  void unshard_now(ParamGroup& group);
  void reshard_now(ParamGroup& group, bool after_forward);
  void prefetch_listed(const ParamGroup& group);
  void prepare_pack(ParamGroup& group);
  void pack(ParamGroup& group);
  void start_behind(const ParamGroup& gathered);
  void report_arrivals();
  void reconcile(const ParamGroup& group);

  const StepMachine& step_;
  std::vector<ParamGroup*> groups_by_id_;
  Scheduler scheduler_;
  CommContext comm_ctx_;
  ReadyGroups ready_;
  ReductionQueue reductions_;
};

}  // namespace fsdp
