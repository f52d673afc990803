#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "collectives/piece_layout.hpp"
#include "fsdp/placement.hpp"
#include "tensor/shard_layout.hpp"

namespace fsdp {

/// One parameter as its group's layout sees it.
struct LayoutParam {
  std::vector<int64_t> sizes, strides;  ///< strides: dense, in memory
  int64_t stored_itemsize = 4;          ///< bytes of an element of the shard
  int64_t gathered_itemsize = 4;        ///< bytes of an element when unsharded
  int64_t dim = 0;                      ///< that is cut; not for the flat layout
  int64_t block_numel = 1;              ///< flat: elements that stay together
  /// Flat: parameters with one run key lie in one run, and must agree in their itemsizes.
  int64_t run_key = 0;
};

/// Where everything of a group lies: its parameters in this rank's shard, in what is gathered, and in
/// what is reduced. The one owner of the arithmetic of pieces, offsets and padding.
///
/// What travels are *segments*, each cut in one piece a rank: in the per-parameter layout one for each
/// parameter; in the flat layout one for each run of parameters, one after another.
class GroupLayout {
 public:
  GroupLayout() = default;
  GroupLayout(std::span<const LayoutParam> params, ParamLayout kind, const Communicator& group);

  /// Bytes of an element of each parameter.
  struct Itemsizes {
    int64_t stored = 0, gathered = 0;
  };
  /// Keeps the places, counted in elements, for other dtypes: every rank keeps what it holds. Flat runs
  /// stay as they are, so their alignment changes with the size of an element.
  GroupLayout with_itemsizes(std::span<const Itemsizes> itemsizes, const Communicator& group) const;

  /// Without these parameters, whose places stay and are empty. Not for the flat layout.
  GroupLayout without(std::span<const size_t> params, const Communicator& group) const;

  /// Has the same parts of the same parameters on every rank, but one after another in this order, in the
  /// shard, in what is gathered and in what is reduced. Per-parameter layout only.
  GroupLayout reordered(std::span<const size_t> params, const Communicator& group) const;
  /// This rank's parts lie in another order in its shard than they are gathered from.
  bool is_repacked() const { return is_repacked_; }

  const ShardLayout& shard(size_t param) const { return shards_[param]; }
  /// Units in this rank's shard, in the dtypes that parameters are kept in; in those they are gathered in.
  const PieceLayout& stored() const { return stored_; }
  const PieceLayout& gathered() const { return gathered_; }

  size_t segment_of(size_t param) const { return extents_[param].segment; }
  /// Elements of the unsharded segment in front of the parameter.
  int64_t start_of(size_t param) const { return extents_[param].start; }
  int64_t piece_numel(size_t segment) const { return piece_numels_[segment]; }
  /// Elements of this rank's piece of the segment in front of what is the parameter's.
  int64_t local_start(size_t param) const { return extents_[param].local_start; }
  /// Parameters by segment, and within it by start.
  const std::vector<size_t>& order() const { return order_; }

  /// Bytes from the start of a shard as `stored()` (as `gathered()`), and their number with the padding.
  int64_t stored_offset(size_t param) const;
  int64_t stored_bytes(size_t param) const;
  int64_t gathered_offset(size_t param) const;
  int64_t gathered_bytes(size_t param) const;
  /// Where the whole parameter begins in the unsharded buffer.
  int64_t unsharded_offset(size_t param) const;

 private:
  struct Extent {
    size_t segment = 0;
    int64_t start = 0, local_start = 0, local_numel = 0;  // elements; local_numel with padding
    int64_t stored_itemsize = 0, gathered_itemsize = 0;
  };
  void measure(const Communicator& group);
  void lay_each(std::span<const LayoutParam> params, int world_size);
  void lay_flat(std::span<const LayoutParam> params, int world_size, int rank);

  std::vector<ShardLayout> shards_;
  std::vector<Extent> extents_;
  std::vector<int64_t> piece_numels_;  // by segment
  std::vector<size_t> order_;
  PieceLayout stored_, gathered_;
  bool is_reordered_ = false, is_repacked_ = false;
};

}  // namespace fsdp
