#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/ordered_dict.h>

#include <map>
#include <string>
#include <vector>

#include "fsdp/api.hpp"
#include "fsdp/dtensor.hpp"
#include "fsdp/incompatible_keys.hpp"
#include "fsdp/local_ranges.hpp"

namespace fsdp {

/// The form of sharded tensors in a state dict. Other tensors (buffers, ignored parameters, a plain module's) are whole in
/// each.
enum class StateDictKind {
  kFull,     ///< whole tensors, as the plain module has them
  kSharded,  ///< this rank's part, with what says where it belongs: readable on another mesh
  kLocal,    ///< this rank's part alone: for the same rank of the same mesh
};

struct FSDP_API StateDictOptions {
  StateDictKind kind = StateDictKind::kFull;
  /// kFull: only the first rank of the mesh gets values; the others return an empty dict. A parameter on another mesh goes to
  /// that mesh's first rank, a tensor-parallel one to the first of all its ranks.
  bool rank0_only = false;
  /// Values are copies on the CPU, made one tensor at a time.
  bool cpu_offload = false;
};

/// One parameter, buffer or optimizer state.
struct FSDP_API StateEntry {
  /// The whole tensor, or this rank's part. With kFull a copy. Otherwise it shares the module's memory, unless cpu_offload is
  /// set.
  at::Tensor value;
  /// The whole tensor's sizes.
  std::vector<int64_t> sizes;
  /// kSharded: the value as a DTensor. Undefined for tensors that are not sharded or not on the mesh's device.
  DTensor dtensor = {};
  /// kSharded, kLocal: the elements of the whole tensor in `value`. Empty for tensors that are not sharded.
  std::vector<ElementRange> ranges = {};
  /// kSharded, kLocal: identifies how the ranks divide the tensor, the same on all ranks. 0: unknown, as for an entry that a
  /// program made.
  uint64_t cut = 0;
  bool is_sharded = false;
};

/// Parameters and buffers, by the plain module's names.
struct FSDP_API StateDict {
  StateDictKind kind = StateDictKind::kFull;
  torch::OrderedDict<std::string, StateEntry> entries = torch::OrderedDict<std::string, StateEntry>();
  /// Further names of tied tensors, each with the name of its entry.
  std::map<std::string, std::string> other_names = {};

  /// The entry of a tensor by any of its names; null if there is none.
  const StateEntry* find(const std::string& name) const;
  /// Adds a whole tensor.
  void insert(const std::string& name, at::Tensor value);
};

/// The module's parameters and buffers. `module` may be any part of a sharded tree, or a plain module. A collective call with
/// kFull, which gathers one parameter at a time.
///
/// Gathered values have the original dtype and strides, and buffers the dtype that they had before a policy cast them.
/// Tensor-parallel parameters are gathered over all their ranks and have the whole tensor's sizes. Other parameters that only
/// ranks of another mesh dimension have (experts) are in these ranks' dicts.
///
/// Throws UsageError for rank0_only with another kind than kFull, StateError on the meta device or inside FullParameters.
FSDP_API StateDict state_dict(const torch::nn::Module& module, const StateDictOptions& options = {});

struct FSDP_API LoadOptions {
  /// True: throws if the dict does not fit exactly. False: loads what fits and returns the rest.
  bool strict = true;
  /// kFull: the first rank of the mesh passes the values, and the others' dicts are ignored. Not with parameters on other
  /// meshes.
  bool broadcast_from_rank0 = false;
};

/// Loads a dict of any kind into the module: each rank takes its own elements, converted to the tensor's dtype. The module may
/// be plain, and the dict may come from a plain module. A tensor is found by any of its names.
///
/// A collective call with broadcast_from_rank0 (one tensor at a time is sent), and with kSharded if the dict's mesh or
/// placements are not the module's. Otherwise nothing is communicated.
///
/// With `strict`, throws UsageError that lists all keys that do not fit, with nothing changed. A dict that the ranks saved
/// together, or that rank 0 broadcasts, is accepted or refused by all ranks alike. Dicts that each rank made itself are not
/// compared.
FSDP_API IncompatibleKeys load_state_dict(torch::nn::Module& module, const StateDict& dict,
                           const LoadOptions& options = {});

template <class Impl>
StateDict state_dict(const torch::nn::ModuleHolder<Impl>& holder, const StateDictOptions& options = {}) {
  return fsdp::state_dict(static_cast<const torch::nn::Module&>(*holder.ptr()), options);
}

template <class Impl>
IncompatibleKeys load_state_dict(const torch::nn::ModuleHolder<Impl>& holder, const StateDict& dict,
                           const LoadOptions& options = {}) {
  return fsdp::load_state_dict(static_cast<torch::nn::Module&>(*holder.ptr()), dict, options);
}

}  // namespace fsdp
