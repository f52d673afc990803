#include "tensor/redistribute/redistribution_plan.hpp"

#include <algorithm>

namespace fsdp {
namespace {

int64_t numel_of(const std::vector<IndexRanges>& indices) {
  int64_t numel = 1;
  for (const IndexRanges& ranges : indices) numel *= count(ranges);
  return numel;
}

MeshDims mask_of(const std::vector<int>& mesh_dims) {
  MeshDims mask;
  for (const int m : mesh_dims) mask.set(m);
  return mask;
}

/// The members of `all` whose bits are set in `chosen`, ascending.
std::vector<int> subset(const std::vector<int>& all, uint64_t chosen) {
  std::vector<int> some;
  for (size_t i = 0; i < all.size(); ++i)
    if (chosen >> i & 1) some.push_back(all[i]);
  return some;
}

}  // namespace

RedistributionPlan::RedistributionPlan(c10::IntArrayRef sizes, const std::vector<int64_t>& mesh_shape,
                                       const std::vector<Placement>& from, const std::vector<Placement>& to)
    : from_(sizes, mesh_shape, from), to_(sizes, mesh_shape, to) {
  std::vector<int> candidates;
  for (size_t m = 0; m < mesh_shape.size(); ++m) {
    if (mesh_shape[m] == 1 || from[m] == to[m]) continue;
    const bool to_sum = to[m] == Placement(Partial{});
    const bool shards = sharded_dim(from[m]).has_value();
    summed_later_.set(m, to_sum && shards);
    on_rank_0_.set(m, to_sum && !shards);
    if (!to_sum && shards) candidates.push_back(static_cast<int>(m));
    if (to_sum || !std::holds_alternative<Replicate>(from[m]) || sharded_dim(to[m])) moves_nothing_ = false;
  }
  // A mesh dimension that keeps its Shard may have to be gathered, too: of what another one had cut.
  for (size_t m = 0; m < mesh_shape.size(); ++m)
    if (mesh_shape[m] > 1 && from[m] == to[m] && sharded_dim(from[m])) candidates.push_back(static_cast<int>(m));
  std::sort(candidates.begin(), candidates.end());
  plan_reductions(from, to);
  plan_gathers(candidates);
}

void RedistributionPlan::plan_reductions(const std::vector<Placement>& from, const std::vector<Placement>& to) {
  // First those that leave less for the others to send.
  for (const Kind kind : {Kind::kReduceScatter, Kind::kAllReduce})
    for (size_t m = 0; m < from.size(); ++m) {
      if (!std::holds_alternative<Partial>(from[m]) || from[m] == to[m]) continue;
      const Kind needed = sharded_dim(to[m]) ? Kind::kReduceScatter : Kind::kAllReduce;
      if (from_.mesh_shape()[m] > 1 && needed == kind) steps_.push_back({kind, static_cast<int>(m)});
    }
}

void RedistributionPlan::plan_gathers(const std::vector<int>& candidates) {
  std::vector<int> best;
  int64_t least = -1;
  for (uint64_t chosen = 0; chosen < uint64_t{1} << candidates.size(); ++chosen) {
    std::vector<int> order = subset(candidates, chosen);
    if (!suffices(mask_of(order))) continue;
    do {
      const int64_t numel = gathered_numel(order);
      if (least >= 0 && numel >= least) continue;
      least = numel;
      best = order;
    } while (std::next_permutation(order.begin(), order.end()));
  }
  for (const int m : best) steps_.push_back({Kind::kAllGather, m});
}

bool RedistributionPlan::suffices(MeshDims dims) const {
  const std::vector<int64_t> origin(from_.mesh_shape().size(), 0);
  const MeshDims known = dims | summed_later_;
  bool all_held = true;
  for (int64_t dim = 0; dim < from_.ndim() && all_held; ++dim) {
    const MeshDims cutting = from_.cutting(dim) | to_.cutting(dim);
    for_each_rank(origin, from_.mesh_shape(), cutting & ~known, [&](const auto& coordinates) {
      all_held = contains(from_.united(dim, coordinates, known), to_.united(dim, coordinates, known));
      return all_held;
    });
  }
  return all_held;
}

int64_t RedistributionPlan::gathered_numel(const std::vector<int>& mesh_dims) const {
  std::vector<int64_t> coordinates(from_.mesh_shape().size(), 0);
  MeshDims done, to_come = mask_of(mesh_dims);
  int64_t total = 0;
  for (const int m : mesh_dims) {
    int64_t most = 0;
    for (int64_t rank = 0; rank < from_.mesh_shape()[m]; ++rank) {
      coordinates[m] = rank;
      most = std::max(most, numel_of(between(coordinates, done, to_come)));
    }
    coordinates[m] = 0;
    total += most * (from_.mesh_shape()[m] - 1);
    done.set(m);
    to_come.reset(m);
  }
  return total;
}

std::vector<IndexRanges> RedistributionPlan::between(const std::vector<int64_t>& coordinates, MeshDims done,
                                                     MeshDims to_come) const {
  std::vector<IndexRanges> indices;
  for (int64_t dim = 0; dim < from_.ndim(); ++dim)
    indices.push_back(intersection(from_.united(dim, coordinates, done), to_.united(dim, coordinates, to_come)));
  return indices;
}

std::vector<IndexRanges> RedistributionPlan::start(const std::vector<int64_t>& coordinates) const {
  std::vector<IndexRanges> indices;
  for (int64_t dim = 0; dim < from_.ndim(); ++dim) indices.push_back(from_.indices(dim, coordinates));
  return indices;
}

std::vector<IndexRanges> RedistributionPlan::held(const std::vector<int64_t>& coordinates, size_t step) const {
  MeshDims done, to_come;
  for (size_t i = 0; i < steps_.size(); ++i) (i < step ? done : to_come).set(steps_[i].mesh_dim);
  return between(coordinates, done, to_come);
}

std::vector<IndexRanges> RedistributionPlan::wanted(const std::vector<int64_t>& coordinates) const {
  std::vector<IndexRanges> indices;
  for (int64_t dim = 0; dim < to_.ndim(); ++dim) indices.push_back(to_.indices(dim, coordinates));
  return indices;
}

bool RedistributionPlan::keeps_values(const std::vector<int64_t>& coordinates) const {
  for (size_t m = 0; m < coordinates.size(); ++m)
    if (on_rank_0_[m] && coordinates[m] != 0) return false;
  return true;
}

}  // namespace fsdp
