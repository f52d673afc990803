#pragma once

namespace fsdp {

/// Counts a group's reductions after which nobody has ever written a parameter: the mark of an optimizer that was built before
/// fully_shard and holds the unsharded tensors. Whether that is said is the root's business: once for all of its groups.
class OptimizerCheck {
 public:
  /// Counts a reduction. True once: when `limit` (0: never) have come without a write.
  bool note_reduction(int limit) { return !was_written_ && reductions_ < limit && ++reductions_ == limit; }
  /// True if `limit` reductions have come without a write.
  bool has_none(int limit) const { return !was_written_ && limit > 0 && reductions_ >= limit; }
  /// Notes a write by anybody but through an unsharded tensor. One before the first reduction does not count: it is how a
  /// parameter gets its first values.
  void note_write() { was_written_ |= reductions_ > 0; }

 private:
  int reductions_ = 0;  // before the first write
  bool was_written_ = false;
};

}  // namespace fsdp
