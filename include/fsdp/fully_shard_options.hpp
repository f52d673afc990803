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
#include "fsdp/device_mesh.hpp"
#include "fsdp/mesh_dims.hpp"
#include "fsdp/param_placement.hpp"
#include "fsdp/policy.hpp"
#include "fsdp/reshard_after_forward.hpp"
#include "fsdp/sanitizer.hpp"

namespace fsdp {

/// What a touch of a sharded parameter outside a step and outside a scope does.
enum class FaultOutsideStep {
  kGather,  ///< gathers, and so is a collective
  kThrow,   ///< StateError naming the parameter
};

struct FullyShardOptions {
  /// Undefined: 1-D over the process's default world. One dimension shards (FSDP); of two named
  /// dimensions the first replicates and the second shards (HSDP).
  DeviceMesh mesh = {};
  /// Set: `mesh` is the full mesh of any number of named dimensions, and these say which of them shard and
  /// which replicate. Several names for one part make groups of ranks the first time: a collective call.
  std::optional<DataParallelMeshDims> dp_mesh_dims = {};
  ReshardAfterForward reshard_after_forward = {};
  MixedPrecisionPolicy mp_policy = {};
  /// `CPUOffloadPolicy{}`: shards and gradients live on the CPU. None: on the mesh's device.
  OffloadPolicy offload_policy = {};
  /// Along which dimension a parameter is cut, by its name in the module and the parameter itself, any
  /// size of it; negative ones count from the end. None: dimension 0. The same on all ranks.
  /// A function that returns a Shard or an optional one will do. A ShardPlacementResult may also name a mesh
  /// of the parameter's own: parameters of one mesh make one group of the module, gathered over its
  /// ranks, and their gradients are averaged over its data-parallel size. Groups of other meshes than the
  /// module's are named with the mesh's dimensions: "blocks.3 [edp]".
  std::function<std::optional<ShardPlacementResult>(const std::string& name, const at::Tensor& parameter)>
      shard_placement_fn = {};
  /// Of parameters that are cut already by tensor parallelism: the module holds its local tensor, computes
  /// with it and communicates as it sees fit; this says what it is a part of. FSDP shards it further,
  /// strided where both cut one dimension. Unsharded parameters stay local; dtensor_of, full_tensor, full_grad, norms and
  /// state dicts see the whole tensor. The same on all ranks of the data-parallel mesh. None: not cut.
  std::function<std::optional<TensorParallel>(const std::string& name, const at::Tensor& parameter)>
      tensor_parallel_fn = {};
  /// Flat: sharded parameters are 1-D, this rank's elements in the order of memory; `local_ranges`
  /// tells which, `full_tensor` gathers one. Parameters of one dtype, trainable or frozen, make a run.
  ParamLayout layout = ParamLayout::kPerParameter;
  /// Flat: how many elements of a parameter, counted from its first, no two ranks may share (blocks of a
  /// quantiser, say). Unset: 1. The same on all ranks.
  std::function<int64_t(const std::string& name, const at::Tensor& parameter)> flat_block_numel = {};
  /// In which form a parameter is gathered, by its name in the module and the parameter itself;
  /// null: as its values. Not for the flat layout, whose pieces hold parts of several parameters. The
  /// same on all ranks.
  std::function<std::shared_ptr<AllGatherExtension>(const std::string& name, const at::Tensor& parameter)>
      all_gather_extension_fn = {};
  /// Parameters (as the module's members hold them) to leave alone: not sharded, moved or reduced. A
  /// parameter that several modules register is one parameter: where they belong to different groups, the
  /// nearest sharded module around them all gathers and reduces it.
  std::vector<at::Tensor> ignored_params = {};
  /// Modules whose subtrees are left alone, except units in them that are sharded already.
  std::vector<std::shared_ptr<torch::nn::Module>> ignored_modules = {};
  /// Parameters to replicate: whole on every rank, never gathered; their gradients are averaged over
  /// all data-parallel ranks by one all-reduce with the group's reduction. What this call does not manage is
  /// passed over; one that is ignored as well is an error. On a mesh of two dimensions that both have several
  /// ranks the first use of it makes groups over both: a collective call.
  std::vector<at::Tensor> replicated_params = {};
  /// The same for all parameters in these subtrees, except units in them that are sharded already.
  std::vector<std::shared_ptr<torch::nn::Module>> replicated_modules = {};
  /// The mesh replicates only (1-D): the same engine as data parallelism without sharding.
  bool replicate_only = false;
  FaultOutsideStep fault_outside_step = FaultOutsideStep::kGather;
  /// Parameters and buffers take the values that they have on the mesh's first rank, before rows are
  /// cut (FSDP1's sync_module_states): broadcast within each shard group from its rank 0, then across
  /// replicas, 250 MiB at a time. The other ranks' modules may be on the meta device
  /// (fsdp::MetaDevice): only the first rank holds the whole module then. What is ignored is not sent.
  /// Makes fully_shard a collective call: all ranks shard the same modules in the same order. Where they
  /// differ, or one rank's call is wrong, every rank throws. Parameters on a mesh of their own take the values
  /// of that mesh's first rank; tensor-parallel ranks keep their own.
  bool sync_from_rank0 = false;
  /// Warn when gradients have been reduced this many times and no optimizer has ever written a
  /// parameter; 0: never.
  int warn_after_unused_gradients = 16;
  /// Look for memory and order faults. Unset: what FSDP_SANITIZE and FSDP_SANITIZE_SEED say.
  std::optional<SanitizerOptions> sanitizer = {};
};

}  // namespace fsdp
