#pragma once

#include <string>

#include "api/params/find_param.hpp"
#include "fsdp/state_dict.hpp"

namespace fsdp {

/// A tensor that a dict is made of, or that a dict is loaded into.
struct StateTensor {
  at::Tensor local;                 ///< what this rank holds: an ordinary tensor
  std::optional<FoundParam> param;  ///< the parameter that it is spread like; none: it is whole here

  c10::IntArrayRef sizes() const {
    return param ? whole_sizes(*param) : local.sizes();
  }
};

/// A dict's entry for `tensor`. kFull is a collective call for what is spread, whether this rank
/// keeps the values or not (then the entry's value is undefined).
StateEntry save_entry(const StateTensor& tensor, const StateDictOptions& options, bool keeps);

/// Why `entry` cannot be loaded into `tensor`; "" if it can. No communication.
std::string misfit(const StateEntry& entry, const StateTensor& tensor);

/// Writes this rank's elements of `entry`. Collective where a kSharded entry has another mesh or other
/// placements than the tensor.
void load_entry(const StateEntry& entry, const StateTensor& tensor);

/// Writes every rank's elements from the first rank's `entry`, which is whole and is broadcast over `mesh`. On other ranks
/// `entry` may be null. A collective call of all ranks of `mesh`.
void load_entry_from_first(const StateEntry* entry, const StateTensor& tensor, const DeviceMesh& mesh,
                           const std::string& name);

}  // namespace fsdp
