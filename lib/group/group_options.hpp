#pragma once

#include <memory>
#include <optional>

#include "fsdp/all_reduce_hook.hpp"
#include "fsdp/custom_comm.hpp"

namespace fsdp {

/// How a group's gradients are reduced. Set from outside at any time between backwards.
struct ReductionConfig {
  bool requires_gradient_sync = true;
  bool requires_all_reduce = true;      ///< HSDP: false adds up partial sums
  bool reduces_unused_params = false;   ///< absent gradients take part as zeros
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

}  // namespace fsdp
