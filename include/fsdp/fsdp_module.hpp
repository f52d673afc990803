#pragma once

#include <c10/core/Event.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/all_reduce_hook.hpp"
#include "fsdp/api.hpp"
#include "fsdp/async_handles.hpp"
#include "fsdp/custom_comm.hpp"
#include "fsdp/device_mesh.hpp"
#include "fsdp/placement.hpp"
#include "fsdp/reduce_scatter_start.hpp"
#include "fsdp/reshard_after_forward.hpp"

namespace fsdp {

class ModuleState;  // of the library
struct Report;      // fsdp/report.hpp

enum class Recurse { kNo, kYes };

/// The settings and controls of one sharded module, by FSDP2's names.
///
/// A handle: copies control the same module, valid as long as the module lives. One thread per root, and one at a time on a
/// communicator: roots of two threads have meshes over one each, or all ranks throw ScheduleError. On a module without
/// parameters to shard a call does nothing. Settings have to be the same on all ranks. With `recurse` they are also made on all
/// sharded modules below, unless that is kNo.
/// FSDP2's register_fsdp_forward_method is not needed: any method of a module may be called.
class FSDP_API FSDPModule {
 public:
  class Inner;  // of the library: its way to the state

  /// True for handles of the same module.
  bool operator==(const FSDPModule& other) const { return state_ == other.state_; }

  /// All-gathers the module's own groups, not those of sharded submodules, and keeps them until `reshard` or the end of the
  /// next backward. A collective call.
  void unshard();
  /// Starts the all-gather and returns; the handle waits for it. Reading a parameter waits by itself. A collective call.
  [[nodiscard]] UnshardHandle unshard_async();
  /// Releases the unsharded parameters. No communication; values that were written to them are kept.
  void reshard();

  /// False: backward adds unsharded gradients up on this rank, without communication; the next backward with true reduces the
  /// sum. That is the next `Tensor::backward` of the thread, also one that needs none of the parameters, or is another model's:
  /// so all ranks have to run it. What comes later is reduced then, and added. Default true.
  void set_requires_gradient_sync(bool value, Recurse recurse = Recurse::kYes);
  /// HSDP. False: backward reduce-scatters within the shard group and adds the results up; the next backward with true
  /// all-reduces the sum across replicas. Default true.
  void set_requires_all_reduce(bool value, Recurse recurse = Recurse::kYes);
  /// On the root. False: more backwards of this step follow, so the end of a backward does not wait for reductions and does
  /// not end the step. Default true.
  void set_is_last_backward(bool value);
  /// On the root. True: the end of a backward reduces only the groups whose gradients are complete, and waits for nothing;
  /// `finalize_backward` does the rest once all backwards of the step are over. For pipelines, in place of
  /// set_is_last_backward. Default false. Throws StateError if it would change while a backward runs or has not been
  /// finalized.
  void set_manual_backward_finalization(bool value);
  /// On the root, after the step's backwards: reduces the remaining groups, waits for all reductions and ends the step. Then
  /// gradients are complete. Does nothing if no backward has run since the last call. A collective call. Throws StateError
  /// without set_manual_backward_finalization, between a forward and its backward, inside a backward, or before the handle of
  /// an earlier call has been waited for.
  void finalize_backward();
  /// As `finalize_backward`, but the handle waits. Until then, do not run this root's forward or backward, and do not read or
  /// clear its gradients.
  [[nodiscard]] GradientReductionHandle finalize_backward_async();
  /// Whether parameters are released between forward and backward. An integer keeps them as shards of that many ranks; it has
  /// to divide the shard size of every group's mesh.
  void set_reshard_after_forward(ReshardAfterForward value, Recurse recurse = Recurse::kYes);
  /// False: parameters stay unsharded after backward, for the next micro-batch. Default true.
  void set_reshard_after_backward(bool value, Recurse recurse = Recurse::kYes);
  /// All-gathers these modules when this one is first used in forward, in place of the learned order. An empty list returns
  /// to the learned order.
  void set_modules_to_forward_prefetch(const std::vector<FSDPModule>& modules);
  /// All-gathers these modules when this one is first used in backward, in place of the learned order. Empty: that order again.
  void set_modules_to_backward_prefetch(const std::vector<FSDPModule>& modules);
  /// On the root: all-gathers run up to this many groups ahead of compute, in the order that the last step showed. 0: none.
  /// Default 1. With 2 or more, all-gathers for backward start before forward ends; capture forward and backward in one CUDA
  /// graph.
  void set_prefetch_distance(int groups);
  /// On the root: the bytes that unsharded parameters may take on this rank, those gathered ahead included. nullopt, the
  /// default: no limit.
  ///
  /// Within the limit, groups whose reshard_after_forward is unset stay unsharded between two uses, chosen so that a step
  /// gathers the fewest bytes; a larger limit never gathers more. This starts with the second step, which knows the order of
  /// use. The limit goes before prefetch lists and, where the order is not known, before reshard_after_forward = false. What
  /// one operator reads together, a user's hook beside its operator, or `unshard()` gathers is there whatever the limit.
  ///
  /// Throws UsageError for less than the largest group. The next forward throws StateError, before it begins, if groups that
  /// stay by their options leave too little.
  void set_unsharded_byte_budget(std::optional<int64_t> bytes);
  /// Gradients are divided by this factor. Default: the data-parallel size.
  void set_gradient_divide_factor(double factor);
  /// FSDP2's older name for set_gradient_divide_factor.
  void set_reduce_scatter_divide_factor(double factor) { set_gradient_divide_factor(factor); }
  /// True: collectives sum, and the division is a kernel of its own, also where the backend could average. Default false.
  void set_force_sum_reduction_for_comms(bool value);
  /// False: backward gathers this module's parameters when they are used, and not ahead. Default true.
  void set_unshard_in_backward(bool value);
  /// On the root. True: every reduction holds all trainable parameters, those without a gradient as zeros, so that ranks may
  /// use different ones. Reductions then run at the end of backward, in one fixed order. Default false.
  void set_reduce_scatter_unused_params(bool value);

  /// How many reduce-scatters may hold packed gradients at the same time; packing the next group's waits for one to end.
  /// Default 1. More hides reduce-scatters that take longer than the backward of one group, for the memory of one packed
  /// group each. Not with set_prefetch_distance(0), which frees these buffers at the next use of a parameter.
  void set_reduce_scatter_max_input_buffers(int buffers, Recurse recurse = Recurse::kYes);
  /// True: gradients are reduced over a communicator of their own, so that backward's all-gathers do not queue behind
  /// reduce-scatters. Default false. The first call for a mesh makes the communicator: a collective call over its ranks.
  ///
  /// The next group is then all-gathered before gradients are packed, as packing may wait for an earlier reduce-scatter's
  /// buffer. Until packing is over, the memory of both is taken.
  void set_separate_reduce_scatter_group(bool enable = true, Recurse recurse = Recurse::kYes);
  /// On the root: when reduce-scatters over a communicator of their own start. Has no effect without one.
  void set_reduce_scatter_start(ReduceScatterStart start);
  /// On the root: times each start `rounds` times, in turns, and sets the one whose median is lowest on its slowest rank. A
  /// collective call over the root's meshes. On one rank no step runs.
  ///
  /// time_step: runs one training step, at least forward and backward, and returns the time it took, in any unit; on a GPU,
  /// after a synchronisation. It is called 2 + 3 * rounds times; the first two steps learn the order. A time that is not
  /// finite counts as the longest. If it throws, it has to throw on all ranks; others would wait. Then the start is what it
  /// was before.
  ///
  /// Throws StateError inside a step, and if no reductions have a communicator of their own.
  ReduceScatterStart choose_reduce_scatter_start(const std::function<double()>& time_step, int rounds = 3);

  /// Runs this group's all-gathers through `comm`; null: through its communicator again. Throws StateError inside a step.
  void set_custom_all_gather(std::shared_ptr<AllGatherComm> comm, Recurse recurse = Recurse::kNo);
  /// Runs this group's reduce-scatters through `comm`; null: through its communicator again. Throws StateError inside a step.
  void set_custom_reduce_scatter(std::shared_ptr<ReduceScatterComm> comm, Recurse recurse = Recurse::kNo);
  /// HSDP: runs `hook` in place of this group's all-reduce across replicas; null: the all-reduce again.
  void set_all_reduce_hook(AllReduceHook hook, Recurse recurse = Recurse::kNo);
  /// True: the buffers of this group's collectives come from the process group's allocator, if its backend has one (NCCL:
  /// memory that is registered for zero-copy transfers); else from LibTorch's. Default false. Over backend "nccl" of
  /// init_process_group this is set_symm_mem_for_comm, and false ends both. Throws UsageError with custom collectives,
  /// StateError inside a step.
  void set_allocate_memory_from_process_group_for_comm(bool enable, Recurse recurse = Recurse::kNo);
  /// Makes all-gathers of this group, from the next step on, write to memory that all ranks have registered with NCCL as
  /// symmetric windows, and reduce-scatters read from such memory. NCCL then reads and writes the other ranks' memory directly,
  /// by its fastest kernels or, for all-gathers, by copy engines (ProcessGroupOptions::use_copy_engine_all_gather).
  ///
  /// All-gathers: groups share a ring of buffers, one more than the prefetch distance, each of the size of the largest group.
  /// A group that encloses others or stays unsharded after forward has a buffer of its own, and so has one with
  /// set_keep_unsharded_storage. A group that stays longer than its turn in the ring, by `unshard` or a byte budget, is
  /// copied to LibTorch's memory. The first step that needs a buffer makes it, a collective call; it lives as long as the
  /// root (ParameterBytes::symmetric).
  ///
  /// Reduce-scatters: set_reduce_scatter_max_input_buffers says how many buffers there are, each of the size of the largest
  /// packed group. Gradients are packed if they are small, cast (reduce_dtype), padded (uneven rows) or in the flat layout.
  /// Others are sent from where autograd left them.
  ///
  /// These use LibTorch's memory: gradients that are not packed, reduced gradients, all-gathers with an extension or after an
  /// integer reshard_after_forward. So does everything if devices cannot map each other's memory, and with NCCL 2.27 and 2.28,
  /// which want it on both sides of a collective; the log says either once. Destroy graphs that have captured it first.
  ///
  /// Throws StateError inside a step, and if the backend has no such memory: it needs backend "nccl" of init_process_group
  /// with NCCL 2.27. Throws UsageError with custom collectives or with set_allocate_memory_from_process_group_for_comm over
  /// c10d.
  void set_symm_mem_for_comm(const std::string& backend = "NCCL");
  /// True: unsharded parameters lie in one buffer that is not freed when they are released, so that every all-gather writes
  /// to the same addresses, as CUDA graphs need. Its memory is always taken (ParameterBytes::kept), and a byte budget does
  /// not count it. An all-gather that is abandoned before its use gives up the buffer. Default false.
  void set_keep_unsharded_storage(bool keep, Recurse recurse = Recurse::kYes);
  /// On the root, CUDA: the next all-gathers wait for `event`, recorded after the optimizer's writes, and not for all work on
  /// the current stream. It holds until this root's next forward has used a parameter: pass a new one after every optimizer
  /// step. Does nothing on the CPU, which has no streams.
  void set_post_optim_event(c10::Event event);

  /// On the root, after an exception: abandons the step under way, drops its gradients and releases all unsharded parameters.
  /// No communication.
  void reset_iter_state();

  bool is_root() const;
  /// True if all of the module's own groups are unsharded now, or it has none.
  bool is_unsharded() const;
  /// "" for a root, else the path from the root, such as "blocks.3".
  const std::string& name() const;
  /// This module and every sharded module below it, in depth-first order.
  std::vector<FSDPModule> sharded_modules() const;
  /// The placements of the module's parameters on `mesh()`, such as {Replicate, Shard(0)}; not of those that a placement
  /// function sent to another mesh or along another dimension: ask dtensor_of.
  std::vector<Placement> placements() const;
  /// The data-parallel mesh that fully_shard was given, of one dimension or two, or cut out of it by dp_mesh_dims.
  const DeviceMesh& mesh() const;
  /// What its root holds, gathers and could save: `fsdp::report`. Include fsdp/report.hpp for its type.
  Report report() const;

 private:
  explicit FSDPModule(std::shared_ptr<ModuleState> state) : state_(std::move(state)) {}

  std::shared_ptr<ModuleState> state_;
};

}  // namespace fsdp
