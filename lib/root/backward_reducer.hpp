#pragma once

#include "fsdp/reduce_scatter_start.hpp"
#include "root/action_runner.hpp"

namespace fsdp {

/// When the groups of one root are reduced, in a backward and at its end.
///
/// Not thread-safe: the root's lock guards it.
class BackwardReducer {
 public:
  /// start: the root's option. Both outlive this.
  BackwardReducer(ActionRunner& runner, const ReduceScatterStart& start) : runner_(runner), start_(start) {}

  /// The group has all the gradients of this backward that it is to get.
  void on_last_gradient(ParamGroup& group);
  /// The backward is over: reduces what it has left, and what backwards before it have without synchronization.
  void flush();
  /// The backward is over: what it has left waits for a later `flush`.
  void leave();

 private:
  const ParamGroup* gather_before_reduce(const ParamGroup& finished);
  ReduceJob pack(ParamGroup& group);
  ReductionQueue::Waits hold_back(ReduceJob& reduction, const ParamGroup* gathered);

  ActionRunner& runner_;
  const ReduceScatterStart& start_;
};

/// All gradients that a reduction in this backward takes have arrived.
bool has_all_gradients(const ParamGroup& group);
/// A backward reduces the group whatever gradients this rank has, as others may have some (set_reduce_scatter_unused_params).
bool owes_zeros(const ParamGroup& group);

}  // namespace fsdp
