#include "group/group_layout.hpp"

#include <map>
#include <numeric>

#include "fsdp/communicator.hpp"
#include "tensor/flat_run.hpp"

namespace fsdp {

GroupLayout::GroupLayout(std::span<const LayoutParam> params, ParamLayout kind,
                         const Communicator& group) {
  if (kind == ParamLayout::kFlat)
    lay_flat(params, group.size(), group.rank());
  else
    lay_each(params, group.size());
  measure(group);
}

GroupLayout GroupLayout::with_itemsizes(std::span<const Itemsizes> itemsizes, const Communicator& group) const {
  GroupLayout other = *this;
  for (size_t i = 0; i < itemsizes.size(); ++i) {
    other.extents_[i].stored_itemsize = itemsizes[i].stored;
    if (other.extents_[i].gathered_itemsize != 0) other.extents_[i].gathered_itemsize = itemsizes[i].gathered;
  }
  other.measure(group);
  return other;
}

GroupLayout GroupLayout::without(std::span<const size_t> params, const Communicator& group) const {
  GroupLayout other = *this;
  for (const size_t i : params) {
    other.shards_[i] = ShardLayout(/*rows=*/int64_t{0}, group.size());
    other.piece_numels_[other.extents_[i].segment] = 0;
    other.extents_[i].local_numel = 0;
  }
  other.measure(group);
  return other;
}

void GroupLayout::measure(const Communicator& group) {
  std::vector<Piece> stored(piece_numels_.size()), gathered(piece_numels_.size());
  for (size_t i = 0; i < extents_.size(); ++i) {
    const auto& shard = shards_[i];
    const auto& extent = extents_[i];
    auto describe = [&](Piece& piece, int64_t itemsize) {
      piece = {.bytes = piece_numels_[extent.segment] * itemsize,
               .outer = shard.outer(),
               .rows = shard.rows(),
               .row_bytes = shard.row_numel() * itemsize};
    };
    describe(stored[extent.segment], extent.stored_itemsize);
    describe(gathered[extent.segment], extent.gathered_itemsize);
  }
  // A backend that sends large pieces apart wants them in front; what was put in order stays so.
  const int64_t alignment = piece_alignment(group.device_type(), group.size());
  stored_ = is_reordered_ ? PieceLayout(std::move(stored), group.size(), PieceLayout::kPackAll, alignment)
                          : PieceLayout(std::move(stored), group);
  gathered_ = PieceLayout(std::move(gathered), group);
  is_repacked_ = is_reordered_ && gathered_.has_direct() && gathered_.has_tail();
}

GroupLayout GroupLayout::reordered(std::span<const size_t> params, const Communicator& group) const {
  GroupLayout other = *this;
  other.is_reordered_ = true;
  for (size_t segment = 0; segment < params.size(); ++segment) {
    other.extents_[params[segment]].segment = segment;
    other.piece_numels_[segment] = piece_numels_[extents_[params[segment]].segment];
    other.order_[segment] = params[segment];
  }
  other.measure(group);
  return other;
}

void GroupLayout::lay_each(std::span<const LayoutParam> params, int world_size) {
  order_.resize(params.size());
  std::iota(order_.begin(), order_.end(), size_t{0});
  for (size_t i = 0; i < params.size(); ++i) {
    const auto& param = params[i];
    shards_.emplace_back(param.sizes, param.strides, param.dim, world_size);
    piece_numels_.push_back(shards_.back().padded_local_numel());
    extents_.push_back({.segment = i,
                       .local_numel = piece_numels_.back(),
                       .stored_itemsize = param.stored_itemsize,
                       .gathered_itemsize = param.gathered_itemsize});
  }
}

void GroupLayout::lay_flat(std::span<const LayoutParam> params, int world_size, int rank) {
  std::map<int64_t, std::vector<size_t>> runs;
  for (size_t i = 0; i < params.size(); ++i) runs[params[i].run_key].push_back(i);
  shards_.assign(params.size(), ShardLayout(int64_t{0}, 1));
  extents_.resize(params.size());
  for (const auto& [key, members] : runs) {
    std::vector<FlatItem> items;
    for (const size_t i : members)
      items.push_back({c10::multiply_integers(params[i].sizes), params[i].block_numel});
    // What is aligned in the smaller of the two dtypes is in the other.
    const auto& first = params[members.front()];
    const int64_t itemsize = std::min(first.stored_itemsize, first.gathered_itemsize);
    const auto run = plan_flat_run(items, world_size, std::max<int64_t>(1, kPieceAlignment / itemsize));
    for (size_t m = 0; m < members.size(); ++m) {
      const size_t i = members[m];
      std::vector<RowRange> held;
      for (int r = 0; r < world_size; ++r) held.push_back(run.held(run.starts[m], items[m].numel, r));
      const auto& mine = held[static_cast<size_t>(rank)];
      extents_[i] = {.segment = piece_numels_.size(),
                    .start = run.starts[m],
                    .local_start = mine.count() > 0 ? run.starts[m] + mine.begin - rank * run.piece_numel : 0,
                    .local_numel = mine.count(),
                    .stored_itemsize = params[i].stored_itemsize,
                    .gathered_itemsize = params[i].gathered_itemsize};
      shards_[i] = ShardLayout::flat(params[i].sizes, params[i].strides, std::move(held));
      order_.push_back(i);
    }
    piece_numels_.push_back(run.piece_numel);
  }
}

int64_t GroupLayout::stored_offset(size_t param) const {
  const auto& extent = extents_[param];
  return stored_.offset(extent.segment) + extent.local_start * extent.stored_itemsize;
}

int64_t GroupLayout::stored_bytes(size_t param) const {
  return extents_[param].local_numel * extents_[param].stored_itemsize;
}

int64_t GroupLayout::gathered_offset(size_t param) const {
  const auto& extent = extents_[param];
  return gathered_.offset(extent.segment) + extent.local_start * extent.gathered_itemsize;
}

int64_t GroupLayout::gathered_bytes(size_t param) const {
  return extents_[param].local_numel * extents_[param].gathered_itemsize;
}

int64_t GroupLayout::unsharded_offset(size_t param) const {
  const auto& extent = extents_[param];
  return gathered_.tensor_offset(extent.segment) + extent.start * extent.gathered_itemsize;
}

}  // namespace fsdp
