#include "tensor/piece.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

namespace fsdp {
namespace {

using Runs = std::vector<std::vector<IndexRun>>;

Runs runs_of(const std::vector<IndexRanges>& first, const std::vector<IndexRanges>& second) {
  Runs runs(first.size());
  for (size_t dim = 0; dim < first.size(); ++dim)
    runs[dim] = common_runs(first[dim], second[dim]);
  return runs;
}

void copy_runs(const at::Tensor& to, const at::Tensor& from, const Runs& runs, size_t dim) {
  if (dim == runs.size()) {
    to.copy_(from);
    return;
  }
  const auto at = static_cast<int64_t>(dim);
  for (const IndexRun& run : runs[dim])
    copy_runs(to.narrow(at, run.first_position, run.count),
              from.narrow(at, run.second_position, run.count), runs, dim + 1);
}

}  // namespace

std::vector<int64_t> sizes_of(const std::vector<IndexRanges>& indices) {
  std::vector<int64_t> sizes;
  for (const IndexRanges& ranges : indices) sizes.push_back(count(ranges));
  return sizes;
}

TensorPiece empty_piece(std::vector<IndexRanges> indices, const at::TensorOptions& options) {
  return {.data = at::empty(sizes_of(indices), options), .indices = std::move(indices)};
}

void copy_common(const TensorPiece& to, const TensorPiece& from) {
  const Runs runs = runs_of(to.indices, from.indices);
  const auto is_empty = [](const auto& of_dim) { return of_dim.empty(); };
  if (std::any_of(runs.begin(), runs.end(), is_empty)) return;
  copy_runs(to.data, from.data, runs, 0);
}

TensorPiece cut(const TensorPiece& piece, const std::vector<IndexRanges>& indices) {
  if (piece.indices == indices) return piece;
  const Runs runs = runs_of(piece.indices, indices);
  if (std::all_of(runs.begin(), runs.end(), [](const auto& of_dim) { return of_dim.size() <= 1; })) {
    TensorPiece view = {.data = piece.data, .indices = indices};
    for (size_t dim = 0; dim < runs.size(); ++dim) {
      const IndexRun run = runs[dim].empty() ? IndexRun{} : runs[dim][0];
      view.data = view.data.narrow(static_cast<int64_t>(dim), run.first_position, run.count);
    }
    return view;
  }
  TensorPiece copy = empty_piece(indices, piece.data.options());
  copy_common(copy, piece);
  return copy;
}

std::vector<int64_t> dense_strides(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  std::vector<size_t> outer_first(sizes.size());
  std::iota(outer_first.begin(), outer_first.end(), size_t{0});
  std::stable_sort(outer_first.begin(), outer_first.end(),
                   [&](size_t a, size_t b) { return strides[a] > strides[b]; });
  std::vector<int64_t> dense(sizes.size());
  int64_t stride = 1;
  for (size_t i = outer_first.size(); i-- > 0;) {
    dense[outer_first[i]] = stride;
    stride *= std::max<int64_t>(sizes[outer_first[i]], 1);
  }
  return dense;
}

}  // namespace fsdp
