#pragma once

#include <vector>

#include "fsdp/placement.hpp"
#include "tensor/piece_map.hpp"

namespace fsdp {

/// One collective over one mesh dimension.
struct RedistributionStep {
  enum class Kind { kReduceScatter, kAllReduce, kAllGather };
  Kind kind;
  int mesh_dim;
  bool operator==(const RedistributionStep&) const = default;
};

/// Plans which collectives take a tensor from some placements to others, and what every rank holds in between. It follows from
/// the arguments alone, so that all ranks plan the same.
///
/// Note [Pieces between steps]
/// After some of the steps, a rank holds of what the placements gave to the ranks that it differs from in
/// these steps' mesh dimensions, all together, as much as is wanted by the ranks that it differs
/// from in the mesh dimensions still to come. So no step sends what no later one needs, and every rank knows
/// what any other holds, without asking.
class RedistributionPlan {
 public:
  /// from, to: normalised.
  RedistributionPlan(c10::IntArrayRef sizes, const std::vector<int64_t>& mesh_shape, const std::vector<Placement>& from,
                     const std::vector<Placement>& to);

  const std::vector<RedistributionStep>& steps() const { return steps_; }
  /// True if every rank's new piece is the old one.
  bool moves_nothing() const { return moves_nothing_; }

  /// What the rank at `coordinates` starts with.
  std::vector<IndexRanges> start(const std::vector<int64_t>& coordinates) const;
  /// What it holds before step `step`, or after the last one.
  std::vector<IndexRanges> held(const std::vector<int64_t>& coordinates, size_t step) const;
  /// What it ends with. Elements that it does not hold then are zeros: summands of a Partial sum.
  std::vector<IndexRanges> wanted(const std::vector<int64_t>& coordinates) const;
  /// False for a rank that is to end with zeros alone.
  bool keeps_values(const std::vector<int64_t>& coordinates) const;

 private:
  using Kind = RedistributionStep::Kind;
  void plan_reductions(const std::vector<Placement>& from, const std::vector<Placement>& to);
  void plan_gathers(const std::vector<int>& candidates);
  /// True if gathering over `dims` leaves no rank without what it is to hold.
  bool suffices(MeshDims dims) const;
  /// Elements received, counted with padding, on the mesh's first rank.
  int64_t gathered_numel(const std::vector<int>& mesh_dims) const;
  std::vector<IndexRanges> between(const std::vector<int64_t>& coordinates, MeshDims done, MeshDims to_come) const;

  PieceMap from_, to_;
  std::vector<RedistributionStep> steps_;
  MeshDims summed_later_;  ///< Shard to Partial sum: all pieces are there, one rank each
  MeshDims on_rank_0_;     ///< to Partial sum from what all ranks have
  bool moves_nothing_ = true;
};

}  // namespace fsdp
