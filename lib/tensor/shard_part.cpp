#include "tensor/shard_part.hpp"

#include <ATen/ATen.h>

#include "base/stable_hash.hpp"
#include "tensor/index_ranges.hpp"
#include "tensor/strides.hpp"

namespace fsdp {

namespace {

int64_t product(c10::IntArrayRef sizes, size_t first, size_t last) {
  int64_t result = 1;
  for (size_t dim = first; dim < last; ++dim) result *= sizes[dim];
  return result;
}

std::vector<ElementRange> box_ranges(const ShardLayout& layout, RowRange held) {
  const auto& sizes = layout.sizes();
  const auto dim = static_cast<size_t>(layout.dim());
  const int64_t before = product(sizes, 0, dim), inside = product(sizes, dim + 1, sizes.size());
  std::vector<ElementRange> ranges;
  for (int64_t i = 0; i < before; ++i)
    append(ranges, {(i * layout.rows() + held.begin) * inside, (i * layout.rows() + held.end) * inside});
  return ranges;
}

std::vector<ElementRange> memory_ranges(const ShardLayout& layout, RowRange elements) {
  const auto& sizes = layout.sizes();
  const c10::IntArrayRef strides = layout.strides();
  if (strides == c10::IntArrayRef(row_major_strides(sizes))) return {{elements.begin, elements.end}};
  // Which element lies at each place: as many entries as elements, for those who ask.
  const auto order = in_memory_order(at::arange(layout.rows(), at::kLong).view(sizes), strides).contiguous();
  const auto* index = order.const_data_ptr<int64_t>();
  std::vector<ElementRange> ranges;
  for (int64_t i = elements.begin; i < elements.end; ++i) append(ranges, {index[i], index[i] + 1});
  return ranges;
}

}  // namespace

at::Tensor part_of(const ShardLayout& layout, const at::Tensor& whole, int rank) {
  const auto held = layout.range(rank);
  if (layout.is_flat()) return in_memory_order(whole, layout.strides()).narrow(0, held.begin, held.count());
  if (layout.sizes().empty()) return held.count() == 1 ? whole : whole.new_empty({0});
  return whole.narrow(layout.dim(), held.begin, held.count());
}

std::vector<ElementRange> element_ranges(const ShardLayout& layout, int rank) {
  if (layout.local_numel(rank) == 0) return {};
  if (layout.sizes().empty()) return {{0, 1}};
  return layout.is_flat() ? memory_ranges(layout, layout.range(rank)) : box_ranges(layout, layout.range(rank));
}

uint64_t cut_hash(const ShardLayout& layout) {
  uint64_t hash = 0;
  const auto mix = [&hash](int64_t value) { hash = mixed_hash(hash, static_cast<uint64_t>(value)); };
  mix(layout.world_size());
  if (layout.is_whole()) return hash;
  mix(layout.is_flat() ? -1 : layout.dim());
  if (!layout.is_flat()) return hash;
  for (const int64_t stride : layout.strides()) mix(stride);
  for (int rank = 0; rank < layout.world_size(); ++rank) {
    mix(layout.range(rank).begin);
    mix(layout.range(rank).end);
  }
  return hash;
}

}  // namespace fsdp
