#pragma once

#include <concepts>
#include <cstdint>

#include "fsdp/api.hpp"

namespace fsdp {

/// What happens to a group's unsharded parameters between forward and backward.
///
/// Unset: released after forward; the root's are kept. true: released. false: kept. n: resharded over n ranks, so that backward
/// gathers over these n ranks only; n has to divide the shard size. 1 is the same as false, the shard size the same as true.
class FSDP_API ReshardAfterForward {
 public:
  ReshardAfterForward() = default;
  template <std::same_as<bool> Bool>
  ReshardAfterForward(Bool value) : ranks_(value ? kAll : kKeep) {}
  template <std::integral Int>
    requires(!std::same_as<Int, bool>)
  ReshardAfterForward(Int ranks) : ranks_(ranks), is_integer_(true) {}

  bool is_set() const { return is_integer_ || ranks_ != kUnset; }
  bool is_integer() const { return is_integer_; }
  /// Only if `is_integer()`.
  int64_t ranks() const { return ranks_; }
  /// Only if set and not an integer.
  bool value() const { return ranks_ == kAll; }

 private:
  static constexpr int64_t kUnset = -1, kAll = -2, kKeep = -3;
  int64_t ranks_ = kUnset;
  bool is_integer_ = false;
};

}  // namespace fsdp
