#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "fsdp/all_reduce_hook.hpp"
#include "fsdp/custom_comm.hpp"
#include "mesh/mesh_info.hpp"

// What users have set of a group. `configure` (root/configure.hpp) changes it, and does what follows.
namespace fsdp {

/// What a group's unsharded parameters do between forward and backward, and after it.
struct ResidencyOptions {
  ReshardPlan after_forward;            ///< set when the root is known
  bool is_after_forward_unset = false;  ///< `after_forward` is a default: a byte budget may decide instead
  bool reshard_after_backward = true;
  /// What is kept after forward stays when the forward ends without a backward to come, too (FSDP2), until the
  /// end of the next backward or `reshard`.
  bool stays_after_evaluation = false;
  bool prefetch_in_backward = true;  ///< FSDP2's set_unshard_in_backward
  std::vector<std::weak_ptr<class ParamGroup>> forward_prefetch, backward_prefetch;
};

/// How a group's gradients are reduced. Set from outside at any time between backwards.
struct ReduceOptions {
  bool requires_gradient_sync = true;
  bool requires_all_reduce = true;     ///< HSDP: false adds up partial sums
  bool reduces_unused_params = false;  ///< absent gradients take part as zeros
  /// Sum in the collective and divide outside, also where the group can multiply in the collective (NCCL).
  bool forces_sum = false;
  /// Where the policy has no reduce_dtype: in the dtypes that parameters are kept in, instead of those that they are
  /// computed in, and, if the policy casts them or one has a grad_dtype, all in the dtype that these promote to. (FSDP2,
  /// since torch 2.15.) Followed by `GradientDtypes::plan`.
  bool in_own_dtype = false;
  std::optional<double> divide_factor;  ///< none: the data-parallel size
  /// Packed inputs of reduce-scatters that may be alive together, this group's among them.
  int max_input_buffers = 1;
  std::shared_ptr<ReduceScatterComm> custom_reduce_scatter;  ///< none: the communicator's own
  AllReduceHook all_reduce_hook;                             ///< none: the replicate group's all-reduce
  /// The shard group's ranks over a communicator of their own; made once, kept while it is not used.
  std::shared_ptr<Communicator> separate_group;
  bool uses_separate_group = false;
};

/// Through what a group's parameters travel, and in which memory.
struct MemoryOptions {
  std::shared_ptr<AllGatherComm> custom_all_gather;  ///< none: the communicator's own. Changed while the group is released
  bool has_symmetric_memory = false;                 ///< see symmetric_memory.hpp. Changed while the group is released
  bool keeps_unsharded_storage = false;              ///< a released group keeps its buffer for its next gather
};

struct GroupOptions {
  ResidencyOptions residency = {};
  ReduceOptions reduce = {};
  MemoryOptions memory = {};
};

}  // namespace fsdp
