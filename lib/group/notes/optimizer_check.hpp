#pragma once

#include <string>

namespace fsdp {

/// Counts a group's reductions after which nobody has ever written a parameter: the mark of an optimizer that was built before
/// fully_shard and holds the unsharded tensors.
class OptimizerCheck {
 public:
  /// Warns once when `limit` (0: never) have come without a write. param: a name to say.
  void note_reduction(const std::string& param, int limit);
  /// By anybody but through an unsharded tensor. Before the first reduction it is how a parameter gets its first values.
  void note_write() { was_written_ |= reductions_ > 0; }

 private:
  int reductions_ = 0;  // before the first write
  bool was_written_ = false;
};

}  // namespace fsdp
