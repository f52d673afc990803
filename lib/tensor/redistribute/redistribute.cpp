#include "tensor/redistribute/redistribute.hpp"

#include <ATen/ATen.h>

#include "tensor/local_piece.hpp"
#include "tensor/redistribute/piece_collectives.hpp"
#include "tensor/redistribute/redistribution_plan.hpp"

namespace fsdp {
namespace {

/// One rank's part in a plan.
class Redistributor {
 public:
  Redistributor(const Redistribution& way, const RedistributionPlan& plan)
      : way_(way), plan_(plan), coordinates_(way.mesh.get_coordinate()) {}

  /// local: one dimension at least.
  TensorPiece run(const at::Tensor& local) const {
    TensorPiece piece = {.data = local, .indices = plan_.start(coordinates_)};
    piece = cut(piece, plan_.held(coordinates_, 0));
    for (size_t step = 0; step < plan_.steps().size(); ++step)
      piece = cut(after(piece, step), plan_.held(coordinates_, step + 1));
    return piece;
  }

 private:
  TensorPiece after(const TensorPiece& piece, size_t step) const {
    const auto [kind, m] = plan_.steps()[step];
    const PieceGroup ranks = {.group = *way_.mesh.get_group(m), .subject = way_.subject};
    switch (kind) {
      case RedistributionStep::Kind::kAllReduce:
        return all_reduce_piece(piece, std::get<Partial>(way_.from[m]).op, ranks);
      case RedistributionStep::Kind::kReduceScatter:
        return reduce_scatter_piece(piece, *sharded_dim(way_.to[m]), held_along(m, *sharded_dim(way_.to[m]), step + 1),
                                    std::get<Partial>(way_.from[m]).op, ranks);
      case RedistributionStep::Kind::kAllGather:
        break;
    }
    const int64_t dim = *sharded_dim(way_.from[m]);
    return all_gather_pieces(piece, dim, held_along(m, dim, step), plan_.held(coordinates_, step + 1), ranks);
  }

  /// What each rank of mesh dimension `m` holds of `dim` before `step`.
  std::vector<IndexRanges> held_along(int m, int64_t dim, size_t step) const {
    std::vector<IndexRanges> of_rank;
    std::vector<int64_t> coordinates = coordinates_;
    for (int64_t rank = 0; rank < way_.mesh.size(m); ++rank) {
      coordinates[m] = rank;
      of_rank.push_back(plan_.held(coordinates, step)[dim]);
    }
    return of_rank;
  }

  const Redistribution& way_;
  const RedistributionPlan& plan_;
  const std::vector<int64_t>& coordinates_;
};

/// Memory for the new piece, laid out as the whole is.
at::Tensor empty_target(c10::IntArrayRef sizes, const Redistribution& way, const at::TensorOptions& options) {
  if (sizes == way.sizes) return at::empty_strided(sizes, way.strides, options);
  if (sizes.size() != way.strides.size()) return at::empty(sizes, options);  // of a 0-dim tensor
  return at::empty_strided(sizes, dense_strides(sizes, way.strides), options);
}

/// `tensor` if it is what memory made for `target` would be.
bool is_laid_out_as(const at::Tensor& tensor, const at::Tensor& target) {
  return tensor.numel() < 2 || tensor.strides() == target.strides();
}

}  // namespace

at::Tensor redistribute_piece(const at::Tensor& local, const Redistribution& way) {
  const std::vector<int64_t>& coordinates = way.mesh.get_coordinate();
  const RedistributionPlan plan(way.sizes, way.mesh.shape(), way.from, way.to);
  if (plan.moves_nothing()) return local;
  // Nothing here is anyone's view, and what is returned shall not be one either.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const LocalPiece target = local_piece(way.sizes, way.mesh.shape(), coordinates, way.to);
  if (local.is_meta()) return empty_target(target.sizes, way, local.options());
  // Collectives run on the mesh's device. What is offloaded goes there, and comes back.
  if (local.device().type() != way.mesh.device_type())
    return redistribute_piece(local.to(way.mesh.device()), way).to(local.device());

  const at::Tensor given = local.dim() == 0 ? local.reshape({1}) : local;
  const TensorPiece piece = Redistributor(way, plan).run(given);
  const std::vector<IndexRanges> wanted = plan.wanted(coordinates);
  const bool complete = piece.indices == wanted && plan.keeps_values(coordinates);
  // Only a fresh meta tensor's strides are looked at here, no memory.
  const at::Tensor layout = empty_target(target.sizes, way, at::TensorOptions(c10::kMeta));
  const at::Tensor same_sizes = complete ? piece.data.reshape(target.sizes) : at::Tensor();
  // Memory of a parameter's part without elements may have been released, and nobody would gather it here.
  const bool is_fresh = complete && same_sizes.numel() > 0 && (local.numel() == 0 || !same_sizes.is_alias_of(local));
  if (is_fresh && is_laid_out_as(same_sizes, layout)) return same_sizes;

  const at::Tensor result = empty_target(target.sizes, way, local.options());
  if (!complete) result.zero_();
  const TensorPiece filled = {.data = result.dim() == 0 ? result.view({1}) : result, .indices = wanted};
  if (plan.keeps_values(coordinates)) copy_common(filled, piece);
  return result;
}

std::vector<Placement> default_gradient(std::vector<Placement> placements) {
  for (Placement& placement : placements)
    if (std::holds_alternative<Partial>(placement)) placement = Replicate{};
  return placements;
}

}  // namespace fsdp
