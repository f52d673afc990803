#pragma once

#include <c10/core/Event.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/all_reduce_hook.hpp"
#include "fsdp/async_handles.hpp"
#include "fsdp/custom_comm.hpp"
#include "fsdp/device_mesh.hpp"
#include "fsdp/placement.hpp"
#include "fsdp/reduce_scatter_start.hpp"
#include "fsdp/reshard_after_forward.hpp"

namespace fsdp {

class ModuleState;  // lib/module: what is attached to a sharded module
struct Report;      // fsdp/report.hpp

enum class Recurse { kNo, kYes };

/// The controls of one sharded module. A cheap handle: copies control the same state, which lives
/// as long as the module. Not thread-safe: one thread per root. On a module without parameters to
/// shard, a control does nothing.
///
/// FSDP2's register_fsdp_forward_method has no counterpart here: any method of a module may be called.
class FSDPModule {
 public:
  explicit FSDPModule(std::shared_ptr<ModuleState> state) : state_(std::move(state)) {}

  /// Gathers the module's own groups (not its sharded submodules') and keeps it until `reshard` or
  /// the end of a backward. A collective call.
  void unshard();
  /// Starts the gather; the handle waits for it. A touch of a parameter waits by itself.
  [[nodiscard]] UnshardHandle unshard_async();
  /// Releases the unsharded parameters. Nothing is communicated, nothing is lost.
  void reshard();

  /// False: backward leaves unsharded gradients on this rank; the next synchronised backward
  /// reduces the sum.
  void set_requires_gradient_sync(bool value, Recurse recurse = Recurse::kYes);
  /// HSDP, false: backward reduces within the shard group only and adds up partial sums.
  void set_requires_all_reduce(bool value, Recurse recurse = Recurse::kYes);
  /// On the root. False: the end of a backward neither waits for reductions nor resets what the
  /// step has learned so far; more backwards follow. Default true.
  void set_is_last_backward(bool value);
  /// On the root, true: the end of a backward waits for nothing and reduces only what is complete;
  /// `finalize_backward`, called after all backwards of a step, does the rest, on the thread that calls it.
  /// Takes the place of set_is_last_backward. Default false. Throws StateError if it would change while
  /// a backward runs or is not finalized.
  void set_manual_backward_finalization(bool value);
  /// On the root, after backward: reduces what is left, waits for all reductions and ends the step: gradients
  /// are there. Nothing to do where no backward has come since the last time. A collective call.
  /// Throws StateError without set_manual_backward_finalization, between a forward and its backward, inside
  /// a backward, or while the handle of an earlier call has not been waited for.
  void finalize_backward();
  /// The same, but does not wait: the handle does. Before that, this root runs no forward and no backward,
  /// and its gradients are neither read nor cleared.
  [[nodiscard]] GradientReductionHandle finalize_backward_async();
  /// An integer has to divide the shard size of every group's mesh.
  void set_reshard_after_forward(ReshardAfterForward value, Recurse recurse = Recurse::kYes);
  /// False: parameters stay unsharded after backward (for the next micro-batch).
  void set_reshard_after_backward(bool value, Recurse recurse = Recurse::kYes);
  /// Gather these when this module is first used in forward, instead of along the learned order.
  /// An empty list returns to the learned order.
  void set_modules_to_forward_prefetch(const std::vector<FSDPModule>& modules);
  void set_modules_to_backward_prefetch(const std::vector<FSDPModule>& modules);
  /// How many groups ahead the learned order is prefetched, on the root. Default 1; 0: never. From 2 on the end of a forward
  /// gathers what its backward begins with, one group fewer, so a CUDA graph is to capture both together.
  void set_prefetch_distance(int groups);
  /// On the root: the memory that its unsharded parameters may take, in bytes. Once a step has
  /// shown the order, groups whose reshard_after_forward is unset stay between forward and backward,
  /// and between their uses in one pass, so that the fewest bytes are gathered within the budget; with
  /// room for the groups gathered ahead. Groups of one operator's operands stay together whatever the
  /// budget. nullopt: no budget, and the defaults of reshard_after_forward. The same on all ranks.
  ///
  /// Throws UsageError if it is less than one group; the next step throws StateError if it is too small
  /// beside the groups that are told to stay.
  void set_unsharded_byte_budget(std::optional<int64_t> bytes);
  /// Gradients are divided by this instead of by the data-parallel size.
  void set_gradient_divide_factor(double factor);
  /// FSDP2's older name for it.
  void set_reduce_scatter_divide_factor(double factor) { set_gradient_divide_factor(factor); }
  /// Sum in the collective, divide outside it, whatever the backend offers.
  void set_force_sum_reduction_for_comms(bool value);
  /// False: a backward does not gather this module's parameters ahead of their use.
  void set_unshard_in_backward(bool value);
  /// On the root: every trainable parameter takes part in every reduction, absent gradients as zero,
  /// so that ranks may use different ones. All reductions then come at the end of backward, in
  /// one fixed order.
  void set_reduce_scatter_unused_params(bool value);

  /// How many groups' packed gradients may be alive in reduce-scatters under way (default 1): the next
  /// group's are packed only when there are fewer. More hides reduce-scatters that take longer than the
  /// backward of one group, and takes their memory. Not with set_prefetch_distance(0), which frees them at
  /// the next use of a parameter.
  void set_reduce_scatter_max_input_buffers(int buffers, Recurse recurse = Recurse::kYes);
  /// True: gradients are reduced over a communicator of their own, so that backward's all-gathers need
  /// not wait for reduce-scatters. False: over the mesh's again. The first time for a mesh's ranks it is a
  /// collective call over them.
  ///
  /// The next parameters are then gathered before a group's gradients are packed, as packing waits for the buffers of
  /// earlier reductions: until it is over the memory of both is taken.
  void set_separate_reduce_scatter_group(bool enable = true, Recurse recurse = Recurse::kYes);
  /// On the root: when reductions over a communicator of their own begin. The same on all ranks. Without such a communicator
  /// it changes nothing.
  void set_reduce_scatter_start(ReduceScatterStart start);
  /// On the root: tries each start in turns, `rounds` times, and sets the one whose median is least for the rank that is
  /// slowest with it. A collective call over the root's meshes; where it throws, the start is what it was. On one rank
  /// there is nothing to choose, and no step runs. Throws StateError in a step, and if no reductions have a communicator
  /// of their own.
  ///
  /// time_step: runs one step, forward and backward at least, and returns how long it took, in any unit; on a GPU until
  /// that is done. It is called 2 + 3 * rounds times, the first two for the order to be learned and followed. Steps train
  /// as any others. A time that is not a finite number is longer than any. What it throws it is to throw on all ranks, as
  /// those that go on wait for the others.
  ReduceScatterStart choose_reduce_scatter_start(const std::function<double()>& time_step, int rounds = 3);

  /// Runs this group's all-gathers through `comm`; null: through its communicator again. The same on
  /// all ranks. Throws StateError inside a step.
  void set_custom_all_gather(std::shared_ptr<AllGatherComm> comm, Recurse recurse = Recurse::kNo);
  /// The same for its reduce-scatters.
  void set_custom_reduce_scatter(std::shared_ptr<ReduceScatterComm> comm, Recurse recurse = Recurse::kNo);
  /// Runs `hook` in place of this group's all-reduce across replicas; null: the default again. The same
  /// on all ranks.
  void set_all_reduce_hook(AllReduceHook hook, Recurse recurse = Recurse::kNo);
  /// True: the buffers of this group's collectives come from the process group's own allocator, where its
  /// backend has one (NCCL: memory registered for zero-copy transfers); elsewhere from LibTorch's, and
  /// nothing but a copy into them differs. Over backend "nccl" it is what `set_symm_mem_for_comm` does, and false
  /// ends both. Throws UsageError with a custom all-gather or reduce-scatter, StateError inside a step.
  void set_allocate_memory_from_process_group_for_comm(bool enable, Recurse recurse = Recurse::kNo);
  /// From the next step on, this group is gathered into memory that all ranks have registered with NCCL as symmetric
  /// windows, and its packed gradients are reduced out of such memory, which lets NCCL write and read the other ranks'
  /// memory directly, by its fastest kernels or, for gathers, by copy engines
  /// (ProcessGroupOptions::gathers_by_copy_engine). The same on all ranks.
  ///
  /// Groups that are gathered one after another share a ring of such buffers, one more than are gathered ahead,
  /// each as large as the largest group that comes to it; groups that enclose others or stay after forward have their
  /// own. They are made when they are first needed, a collective call, and live as long as the root
  /// (ParameterBytes::symmetric). What `unshard` or a byte budget keeps longer than its turn is copied to memory of its
  /// own; set_keep_unsharded_storage gives a group a slot of its own and changes nothing else then.
  ///
  /// Gradients have as many buffers as set_reduce_scatter_max_input_buffers lets be alive, each as large as the packed
  /// gradients of the largest group: those that are small, cast (reduce_dtype), padded (uneven rows) or
  /// share a flat run. The others travel from where autograd made them and are not copied for it.
  ///
  /// In LibTorch's memory are those others, reduced gradients, gathers with extensions and those after an integer
  /// reshard_after_forward; and all buffers where the devices cannot map each other's, which is said once in the log.
  ///
  /// Throws StateError where the backend has no such memory: it is backend "nccl" of init_process_group that has, with
  /// NCCL 2.27; inside a step; UsageError with custom collectives or a c10d group's own memory.
  void set_symm_mem_for_comm(const std::string& backend = "NCCL");
  /// True: the unsharded parameters lie in one buffer that is kept when they are released and filled again
  /// by the next all-gather, at the same addresses (CUDA graphs want that). Takes their memory
  /// all the time (ParameterBytes::kept); a byte budget does not count it. A gather that is given up before
  /// it was used gives up its buffer too.
  void set_keep_unsharded_storage(bool keep, Recurse recurse = Recurse::kYes);
  /// On the root, CUDA: until this root's next forward has used a parameter, all-gathers wait for
  /// `event`, recorded behind the optimizer's writes, instead of for all that is queued on the
  /// current stream. It is dropped then, so every step wants a new one. On CPU there are no streams, and
  /// nothing to do.
  void set_post_optim_event(c10::Event event);

  /// On the root, after an exception: forgets the step under way, drops its gradients, releases
  /// everything unsharded. No communication.
  void reset_iter_state();

  bool is_root() const;
  /// True if the module's own groups are unsharded now (also if it has none).
  bool is_unsharded() const;
  /// "" for a root, else the path from the root, such as "blocks.3".
  const std::string& name() const;
  /// This module and every sharded module below it, in depth-first order.
  std::vector<FSDPModule> sharded_modules() const;
  /// The placements of the module's parameters on `mesh()`, such as {Replicate, Shard(0)}; not of those
  /// that a placement function sent to another mesh or along another dimension: ask dtensor_of.
  std::vector<Placement> placements() const;
  /// The data-parallel mesh that fully_shard was given, of one dimension or two, or cut out of it by
  /// dp_mesh_dims.
  const DeviceMesh& mesh() const;
  /// What its root holds, gathers and could save: fsdp::report. Its type is in fsdp/report.hpp.
  Report report() const;

  ModuleState& state() const { return *state_; }
  std::shared_ptr<ModuleState> shared_state() const { return state_; }

 private:
  std::shared_ptr<ModuleState> state_;
};

}  // namespace fsdp
