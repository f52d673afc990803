#pragma once

#include <cstdint>
#include <string>

#include "base/tree_interval.hpp"

namespace fsdp {

/// Over which ranks a group's gradients are reduce-scattered, and with which communicator.
struct ReduceFacts {
  int ranks = 0;          ///< groups of one root over the same ranks have the same number; -1: the group is gone
  bool is_apart = false;  ///< over a communicator that no gather uses
  bool operator==(const ReduceFacts&) const = default;
};

/// What decisions need to know of a group: its size, its place and its options. All ranks have the same.
struct GroupFacts {
  std::string name = {};
  int64_t unsharded_bytes = 0;
  /// One rank's parameters that nothing casts are never gathered and never released.
  bool is_never_released = false;
  TreeInterval tree = {};  ///< of the group's module
  ReduceFacts reduce = {};

  bool reshards_after_forward = true;
  bool is_after_forward_unset = false;  ///< that is a default: a byte budget may decide instead
  bool reshards_after_backward = true;
  bool stays_after_evaluation = false;  ///< ResidencyOptions::stays_after_evaluation
  bool prefetches_in_backward = true;   ///< it is gathered ahead there
  bool has_forward_list = false, has_backward_list = false;  ///< a prefetch list says what is gathered with its use

  /// Its module is around the other's, or the same.
  bool encloses(const GroupFacts& other) const {
    return this != &other && tree.encloses(other.tree);
  }
  bool operator==(const GroupFacts&) const = default;
};

}  // namespace fsdp
