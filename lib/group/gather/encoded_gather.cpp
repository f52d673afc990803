#include "group/gather/encoded_gather.hpp"

#include <ATen/ATen.h>

#include "base/raw_view.hpp"
#include "base/require.hpp"
#include "collectives/buffer.hpp"
#include "collectives/all_gather.hpp"
#include "group/gather/prepared_extension.hpp"
#include "param/param_rows.hpp"
#include "tensor/shard_part.hpp"

namespace fsdp {

namespace {

/// Rank `rank`'s piece, packed rows (1-D, with padding), to its place in the whole parameter.
void place_rows(const ShardLayout& layout, int rank, const at::Tensor& piece, const at::Tensor& whole) {
  const auto rows = piece.as_strided(layout.local_sizes(rank), layout.local_strides(rank), piece.storage_offset());
  if (rows.numel() > 0) part_of(layout, whole, rank).copy_(rows, /*non_blocking=*/true);
}

/// The whole parameter inside the unsharded buffer.
at::Tensor whole_parameter(const GroupParts& group, size_t param, const at::Tensor& unsharded) {
  const auto& shown = group.params[param];
  const auto bytes = unsharded.narrow(0, group.layout.unsharded_offset(param), shown.spec.unsharded_bytes());
  const auto values = bytes.view(shown.spec.param_dtype);
  return values.as_strided(shown.spec.sizes(), shown.spec.strides(), values.storage_offset());
}

}  // namespace

EncodedGather::EncodedGather(const GroupLayout& layout, Extensions extensions, std::vector<at::ScalarType> dtypes,
                             int world_size)
    : extensions_(std::move(extensions)), dtypes_(std::move(dtypes)), encoded_bytes_(dtypes_.size()) {
  std::vector<Piece> pieces;
  for (size_t segment = 0; segment < layout.gathered().count(); ++segment)
    pieces.push_back({.bytes = layout.gathered().piece_bytes(segment)});
  for (size_t i = 0; i < dtypes_.size(); ++i) {
    if (!extensions_[i]) continue;
    const auto numel = layout.piece_numel(layout.segment_of(i));
    encoded_bytes_[i] = numel > 0 ? extensions_[i]->encoded_bytes(numel, dtypes_[i]) : 0;
    require(encoded_bytes_[i] >= 0, "all-gather extension '{}': encoded_bytes({}, {}) gave {}; expected 0 or more",
            extensions_[i]->name(), numel, c10::toString(dtypes_[i]), encoded_bytes_[i]);
    // Every rank's bytes begin aligned.
    pieces[layout.segment_of(i)].bytes = aligned(encoded_bytes_[i]);
  }
  layout_ = PieceLayout(std::move(pieces), world_size).packed();
}

void EncodedGather::encode(size_t param, const at::Tensor& piece, const at::Tensor& encoded) const {
  extensions_[param]->pre_all_gather(piece.view(dtypes_[param]), encoded.narrow(0, 0, encoded_bytes_[param]));
  const int64_t gap = encoded.numel() - encoded_bytes_[param];
  if (gap > 0) encoded.narrow(0, encoded_bytes_[param], gap).zero_();  // it travels, so it is defined
}

void EncodedGather::write(const GroupParts& group, std::span<const at::Tensor> pieces, const at::Tensor& part) const {
  for (size_t i = 0; i < pieces.size(); ++i) {
    const size_t segment = group.layout.segment_of(i);
    if (pieces[i].numel() == 0) continue;
    if (extensions_[i]) {
      encode(i, pieces[i], part.narrow(0, layout_.offset(segment), layout_.piece_bytes(segment)));
      continue;
    }
    const int64_t begin = group.layout.gathered_offset(i) - group.layout.gathered().offset(segment);
    cast_rows(group.params[i].spec, pieces[i], part.narrow(0, layout_.offset(segment) + begin, group.layout.gathered_bytes(i)));
  }
}

at::Tensor EncodedGather::read(const GroupParts& group, const AllGather& gather) const {
  const auto& gathered = group.layout.gathered();
  auto unsharded =
      gather.unsharded.defined() ? gather.unsharded : make_buffer(gathered.total_bytes(), gather.tail.options());
  std::vector<bool> is_placed(gathered.count(), false);
  for (size_t i = 0; i < group.params.size(); ++i) {
    const size_t segment = group.layout.segment_of(i);
    if (is_placed[segment] || layout_.piece_bytes(segment) == 0) continue;
    is_placed[segment] = true;
    const auto& shard = group.layout.shard(i);
    if (extensions_[i]) {
      read_encoded(group, i, gather, unsharded);
    } else if (shard.is_flat() || shard.outer() == 1) {
      place_pieces(gather, segment, unsharded, gathered.tensor_offset(segment));
    } else {
      const auto rows = gathered_pieces(gather, segment).view(group.params[i].spec.param_dtype);
      const auto whole = whole_parameter(group, i, unsharded);
      for (int rank = 0; rank < layout_.world_size(); ++rank) place_rows(shard, rank, rows[rank], whole);
    }
  }
  return unsharded;
}

void EncodedGather::read_encoded(const GroupParts& group, size_t param, const AllGather& gather,
                              const at::Tensor& unsharded) const {
  const size_t segment = group.layout.segment_of(param);
  const auto& shard = group.layout.shard(param);
  const auto& gathered = group.layout.gathered();
  const auto encoded = gathered_pieces(gather, segment).narrow(1, 0, encoded_bytes_[param]);
  const auto dtype = group.params[param].spec.param_dtype;
  const int ranks = layout_.world_size();
  if (gathered.tensor_bytes(segment) == 0) return extensions_[param]->post_all_gather(encoded, dtypes_[param], {});
  if (shard.outer() == 1) {
    const auto values =
        unsharded.narrow(0, gathered.tensor_offset(segment), gathered.tensor_bytes(segment)).view(dtype).view({ranks, -1});
    extensions_[param]->post_all_gather(encoded, dtypes_[param], values);
    return;
  }
  const auto values = make_buffer(gathered.tensor_bytes(segment), unsharded.options()).view(dtype).view({ranks, -1});
  extensions_[param]->post_all_gather(encoded, dtypes_[param], values);
  const auto whole = whole_parameter(group, param, unsharded);
  for (int rank = 0; rank < ranks; ++rank) place_rows(shard, rank, values[rank], whole);
}

at::Tensor EncodedGather::shown(const GroupParts& group, size_t param, const at::Tensor& piece) const {
  if (!extensions_[param] || dynamic_cast<const PreparedExtension*>(extensions_[param].get()) != nullptr) return {};
  const auto& shown = group.params[param];
  const int64_t numel = group.layout.piece_numel(group.layout.segment_of(param));
  auto values = at::empty({1, numel}, piece.options().dtype(shown.spec.param_dtype));
  if (numel == 0) return values[0];
  const auto encoded = make_buffer(aligned(encoded_bytes_[param]), piece.options());
  encode(param, piece, encoded);
  extensions_[param]->post_all_gather(encoded.unsqueeze(0).narrow(1, 0, encoded_bytes_[param]), dtypes_[param],
                                      values);
  return values[0];
}

}  // namespace fsdp
