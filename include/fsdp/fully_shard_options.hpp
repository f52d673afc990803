#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/all_gather_extension.hpp"
#include "fsdp/api.hpp"
#include "fsdp/device_mesh.hpp"
#include "fsdp/mesh_dims.hpp"
#include "fsdp/param_placement.hpp"
#include "fsdp/policy.hpp"
#include "fsdp/reshard_after_forward.hpp"
#include "fsdp/sanitizer.hpp"

namespace fsdp {

/// What happens when a program uses a sharded parameter outside a step and outside a scope.
enum class FaultOutsideStep {
  kGather,  ///< it is gathered: a collective call
  kThrow,   ///< StateError naming the parameter
};

struct FSDP_API FullyShardOptions {
  /// Default: 1-D over the process's default world. One dimension shards (FSDP). Of two named dimensions, the first
  /// replicates and the second shards (HSDP).
  DeviceMesh mesh = {};
  /// If set, `mesh` may have any number of named dimensions, and this says which of them shard and which replicate. Where one
  /// part has several names, the first call makes groups of ranks: a collective call.
  std::optional<DataParallelMeshDims> dp_mesh_dims = {};
  ReshardAfterForward reshard_after_forward = {};
  MixedPrecisionPolicy mp_policy = {};
  /// `CPUOffloadPolicy{}`: shards and gradients live on the CPU. Default: on the mesh's device.
  OffloadPolicy offload_policy = {};
  /// The dimension along which a parameter is sharded. Called with the parameter's name in the module and the parameter; has to
  /// return the same on all ranks. The dimension may have any size; a negative one counts from the end. nullopt: dimension 0.
  ///
  /// The function may also return a Shard or std::optional<Shard>. A ShardPlacementResult may name another mesh for the
  /// parameter. The module's parameters on one mesh make one group: they are gathered over that mesh, and their gradients are
  /// averaged over its data-parallel size. The name of a group on another mesh ends in that mesh's dimensions:
  /// "blocks.3 [edp]".
  std::function<std::optional<ShardPlacementResult>(const std::string& name, const at::Tensor& parameter)>
      shard_placement_fn = {};
  /// For tensor-parallel parameters: which part of the whole tensor the module's local tensor is. The module computes with the
  /// local tensor and does its own communication. FSDP shards it further, with a StridedShard where both shard one dimension.
  /// Unsharded parameters are the local tensors; dtensor_of, full_tensor, full_grad, norms and state dicts see the whole
  /// tensor. Has to return the same on all ranks of the data-parallel mesh. nullopt: not tensor-parallel.
  std::function<std::optional<TensorParallel>(const std::string& name, const at::Tensor& parameter)>
      tensor_parallel_fn = {};
  /// kFlat: a group's parameters of one dtype are laid out one after another and cut into equal parts, trainable and frozen
  /// ones apart. A sharded parameter is then 1-D: this rank's elements of it, in the order of memory. `local_ranges` says
  /// which they are; `full_tensor` gathers the parameter.
  ParamLayout layout = ParamLayout::kPerParameter;
  /// kFlat: blocks of this many consecutive elements of a parameter stay on one rank, such as a quantiser's blocks. Default: 1.
  /// Has to return the same on all ranks.
  std::function<int64_t(const std::string& name, const at::Tensor& parameter)> flat_block_numel = {};
  /// How a parameter is encoded for its all-gather, such as int8_all_gather(). Called with the parameter's name in the module
  /// and the parameter; has to return the same on all ranks. Null: not encoded. Not with the flat layout, where a piece
  /// holds parts of several parameters.
  std::function<std::shared_ptr<AllGatherExtension>(const std::string& name, const at::Tensor& parameter)>
      all_gather_extension_fn = {};
  /// Parameters that are not sharded, moved or reduced; given as the module's members hold them. A parameter that several
  /// modules register is one parameter. If these modules belong to different groups, the nearest sharded module that
  /// contains all of them gathers and reduces it.
  std::vector<at::Tensor> ignored_params = {};
  /// Modules whose subtrees are not sharded, moved or reduced, except for modules in them that are sharded already.
  std::vector<std::shared_ptr<torch::nn::Module>> ignored_modules = {};
  /// Parameters that every rank holds whole and that are never gathered. Their gradients are averaged over all data-parallel
  /// ranks, by one all-reduce beside the group's reduction. Parameters that this call does not manage are skipped; one that
  /// is also ignored is an error. If both dimensions of a 2-D mesh have several ranks, the first use makes groups over
  /// both: a collective call.
  std::vector<at::Tensor> replicated_params = {};
  /// Modules in whose subtrees all parameters are replicated, as `replicated_params` are, except for modules in them that are
  /// sharded already.
  std::vector<std::shared_ptr<torch::nn::Module>> replicated_modules = {};
  /// True: the mesh, of one dimension, replicates: data parallelism without sharding.
  bool replicate_only = false;
  FaultOutsideStep fault_outside_step = FaultOutsideStep::kGather;
  /// True: before they are sharded, parameters and buffers take the values of the mesh's first rank (FSDP1's
  /// sync_module_states). They are broadcast within each shard group from its rank 0, then across replicas, 250 MiB at a
  /// time. On the other ranks the module may be on the meta device (fsdp::MetaDevice), so that only the first rank holds it
  /// whole. Ignored parameters are not sent. Parameters on another mesh take the values of that mesh's first rank;
  /// tensor-parallel ranks keep their own.
  ///
  /// fully_shard is then a collective call: all ranks shard the same modules in the same order. If they differ, or one rank's
  /// call is invalid, every rank throws.
  bool sync_from_rank0 = false;
  /// Warns when gradients were reduced this many times and nothing has written a parameter since fully_shard. 0: never.
  int warn_after_unused_gradients = 16;
  /// Looks for memory and ordering faults. Default: as FSDP_SANITIZE and FSDP_SANITIZE_SEED say.
  std::optional<SanitizerOptions> sanitizer = {};
};

}  // namespace fsdp
