#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/ordered_dict.h>

#include <map>
#include <string>
#include <vector>

#include "fsdp/dtensor.hpp"
#include "fsdp/local_ranges.hpp"

namespace fsdp {

/// In which form a state dict holds what is sharded. What is not (buffers, ignored parameters, a
/// plain module's) is whole in each.
enum class StateDictKind {
  kFull,     ///< whole tensors, as the plain module has them
  kSharded,  ///< this rank's part, with what says where it belongs: readable on another mesh
  kLocal,    ///< this rank's part alone: for the same rank of the same mesh
};

struct StateDictOptions {
  StateDictKind kind = StateDictKind::kFull;
  /// kFull: only the first rank of the mesh keeps the values; the others return an empty dict. A parameter on
  /// a mesh of its own is kept by that mesh's first rank; a tensor-parallel one by the first of all.
  bool rank0_only = false;
  /// Copies on the CPU, made one tensor at a time.
  bool cpu_offload = false;
};

/// One parameter, buffer or optimizer state.
struct StateEntry {
  /// The whole tensor, or what this rank holds of it. kFull: a copy. Else it shares the module's
  /// memory, as LibTorch's state does, unless cpu_offload made a copy.
  at::Tensor value;
  /// The whole tensor's sizes.
  std::vector<int64_t> sizes;
  /// kSharded: the same joined with mesh and placements; undefined for what is not sharded, or lies on
  /// another device than the mesh.
  DTensor dtensor = {};
  /// kSharded, kLocal: the elements of the whole tensor in `value`; none for what is not sharded.
  std::vector<ElementRange> ranges = {};
  /// kSharded, kLocal: which rank holds which elements, as a number that all ranks share. 0: not known, as for
  /// an entry that was made by hand.
  uint64_t cut = 0;
  bool is_sharded = false;
};

/// Parameters and buffers by the names that the plain module has for them.
struct StateDict {
  StateDictKind kind = StateDictKind::kFull;
  torch::OrderedDict<std::string, StateEntry> entries = torch::OrderedDict<std::string, StateEntry>();
  /// Further names of a tensor that has several, each with the one it is saved under.
  std::map<std::string, std::string> other_names = {};

  /// By any of its names; null if there is none.
  const StateEntry* find(const std::string& name) const;
  /// Adds a whole tensor.
  void insert(const std::string& name, at::Tensor value);
};

/// The module's parameters and buffers. Works for any part of a sharded tree, and for plain modules.
/// kFull gathers one parameter at a time: a collective call. Gathered values have the original dtype and
/// strides; buffers that a policy has cast come in the dtype they had before. Tensor-parallel parameters have
/// the whole tensor's sizes, over all their ranks; other parameters that ranks of another mesh dimension have
/// (experts) are in these ranks' dicts.
/// Throws UsageError for rank0_only with another kind than kFull, StateError on the meta device
/// or while full parameters are shown.
StateDict state_dict(const torch::nn::Module& module, const StateDictOptions& options = {});

struct LoadOptions {
  /// Throw if the dict does not fit exactly; false: load what fits and return the rest.
  bool strict = true;
  /// Only the first rank of the mesh passes values (kFull); what the others pass is not looked at. Not with
  /// parameters on meshes of their own that are a part of the module's.
  bool broadcast_from_rank0 = false;
};

/// What did not fit.
struct LoadResult {
  std::vector<std::string> missing;     ///< of the module, not in the dict
  std::vector<std::string> unexpected;  ///< in the dict, not of the module
  std::vector<std::string> wrong;       ///< other sizes, another layout or a dtype that cannot be converted, with both
  bool fits() const { return missing.empty() && unexpected.empty() && wrong.empty(); }
};

/// Writes a dict of any kind into the module: each rank takes the elements it owns, converted to the
/// tensor's own dtype. The module may be plain, and the dict come from a plain module. A tensor is found
/// under any of its names.
///
/// Collective with broadcast_from_rank0 (one tensor at a time travels), and for kSharded where the
/// dict's mesh or placements are others than the module's; else nothing is communicated.
/// Throws UsageError naming all keys that do not fit, if `strict`, before anything is changed. Dicts that the
/// ranks saved together are taken or refused by all ranks alike, also where one rank's part would be the same in
/// the module's layout; so is rank 0's where it is broadcast. Nobody compares dicts that one rank made otherwise.
LoadResult load_state_dict(torch::nn::Module& module, const StateDict& dict,
                           const LoadOptions& options = {});

template <class Impl>
StateDict state_dict(const torch::nn::ModuleHolder<Impl>& holder, const StateDictOptions& options = {}) {
  return fsdp::state_dict(static_cast<const torch::nn::Module&>(*holder.ptr()), options);
}

template <class Impl>
LoadResult load_state_dict(const torch::nn::ModuleHolder<Impl>& holder, const StateDict& dict,
                           const LoadOptions& options = {}) {
  return fsdp::load_state_dict(static_cast<torch::nn::Module&>(*holder.ptr()), dict, options);
}

}  // namespace fsdp
