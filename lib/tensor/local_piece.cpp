#include "tensor/local_piece.hpp"

#include "base/require.hpp"
#include "tensor/piece_map.hpp"

namespace fsdp {
namespace {

/// `dim` counted from the front.
int64_t checked_dim(int64_t dim, const Placement& placement, int64_t ndim, std::string_view subject) {
  const int64_t dims = std::max<int64_t>(ndim, 1);
  if (dim < -dims || dim >= dims) [[unlikely]]
    throw UsageError(fmt::format("{}: {} needs a tensor with that dimension, got one of {} "
                                 "dimension(s); use a dimension in [{}, {})",
                                 subject, to_string(placement), ndim, -dims, dims));
  return dim < 0 ? dim + dims : dim;
}

void check_one_reduction(const std::vector<Placement>& placements, std::string_view subject) {
  const Partial* first = nullptr;
  for (const Placement& placement : placements)
    if (const auto* partial = std::get_if<Partial>(&placement)) {
      if (first == nullptr) first = partial;
      if (*partial != *first) [[unlikely]]
        throw UsageError(fmt::format("{}: expected Partials of one operation, got {}; the result would "
                                     "depend on which is taken first, so redistribute one after the other",
                                     subject, to_string(placements)));
    }
}

/// Writes the ranges of `piece` down, outer dimensions first.
class RangeWriter {
 public:
  RangeWriter(const std::vector<IndexRanges>& indices, std::vector<int64_t> sizes)
      : indices_(indices), sizes_(std::move(sizes)), strides_(sizes_.size(), 1) {
    for (size_t dim = sizes_.size(); dim-- > 1;) strides_[dim - 1] = strides_[dim] * sizes_[dim];
    // From here on every index is held, so that a range of the dimension before is one of elements.
    while (innermost_ > 0 && indices_[innermost_] == all_indices(sizes_[innermost_])) --innermost_;
  }

  std::vector<ElementRange> ranges() {
    for (const IndexRanges& ranges : indices_)
      if (ranges.empty()) return {};
    write(0, 0);
    return std::move(found_);
  }

 private:
  void write(size_t dim, int64_t base) {
    for (const IndexRange& range : indices_[dim])
      if (dim == innermost_)
        append(found_, {base + range.begin * strides_[dim], base + range.end * strides_[dim]});
      else
        for (int64_t index = range.begin; index < range.end; ++index)
          write(dim + 1, base + index * strides_[dim]);
  }

  const std::vector<IndexRanges>& indices_;
  std::vector<int64_t> sizes_, strides_;
  size_t innermost_ = sizes_.size() - 1;
  std::vector<ElementRange> found_;
};

}  // namespace

std::vector<Placement> normalised(std::vector<Placement> placements, const DeviceMesh& mesh,
                                  int64_t ndim, std::string_view subject) {
  if (static_cast<int>(placements.size()) != mesh.ndim()) [[unlikely]]
    throw UsageError(fmt::format("{}: expected one placement for each dimension of {}, got {}: {}",
                                 subject, mesh.to_string(), placements.size(), to_string(placements)));
  for (Placement& placement : placements) {
    if (auto* shard = std::get_if<Shard>(&placement))
      shard->dim = checked_dim(shard->dim, placement, ndim, subject);
    if (auto* shard = std::get_if<StridedShard>(&placement)) {
      shard->dim = checked_dim(shard->dim, placement, ndim, subject);
      if (shard->split_factor < 1) [[unlikely]]
        throw UsageError(fmt::format("{}: expected a split factor of 1 at least, got {}", subject,
                                     to_string(placement)));
    }
  }
  check_one_reduction(placements, subject);
  return placements;
}

LocalPiece local_piece(c10::IntArrayRef sizes, const std::vector<int64_t>& mesh_shape,
                       const std::vector<int64_t>& coordinates,
                       const std::vector<Placement>& placements) {
  const PieceMap map(sizes, mesh_shape, placements);
  LocalPiece piece;
  for (int64_t dim = 0; dim < map.ndim(); ++dim) {
    piece.indices.push_back(map.indices(dim, coordinates));
    piece.sizes.push_back(count(piece.indices[dim]));
  }
  if (sizes.empty()) {
    piece.indices.clear();
    if (piece.sizes[0] == 1) piece.sizes.clear();
  }
  return piece;
}

std::vector<ElementRange> element_ranges(c10::IntArrayRef sizes,
                                         const std::vector<int64_t>& mesh_shape,
                                         const std::vector<int64_t>& coordinates,
                                         const std::vector<Placement>& placements) {
  LocalPiece piece = local_piece(sizes, mesh_shape, coordinates, placements);
  if (sizes.empty())
    return piece.sizes.empty() ? std::vector<ElementRange>{{0, 1}} : std::vector<ElementRange>{};
  return RangeWriter(piece.indices, sizes.vec()).ranges();
}

}  // namespace fsdp
