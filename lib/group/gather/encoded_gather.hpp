#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <span>
#include <vector>

#include "collectives/all_gather.hpp"
#include "fsdp/all_gather_extension.hpp"
#include "group/group_parts.hpp"

namespace fsdp {

/// One for each parameter of a group; null where it travels as its values.
using Extensions = std::vector<std::shared_ptr<AllGatherExtension>>;

/// What travels when a group is gathered in another form than its values, or through a user's own
/// collective: one packed buffer, in which each segment of the group's layout is one piece, encoded by the
/// parameter's extension where it has one.
///
/// Knows where the bytes lie; the group is handed to it, laid out as it was when this was made.
class EncodedGather {
 public:
  /// dtypes: that the parameters are kept in. An encoded parameter is a segment of its own.
  EncodedGather(const GroupLayout& layout, Extensions extensions, std::vector<at::ScalarType> dtypes, int world_size);

  const PieceLayout& layout() const { return layout_; }
  /// True if extensions send as many bytes in `other`.
  bool has_sizes_of(const EncodedGather& other) const { return encoded_bytes_ == other.encoded_bytes_; }

  /// pieces: what this rank holds of each parameter, in bytes, as stored. part: layout().rank_bytes() long.
  void write(const GroupParts& group, std::span<const at::Tensor> pieces, const at::Tensor& part) const;
  /// The unsharded buffer of a packed gather that has been waited for; into gather.unsharded if there is one.
  at::Tensor read(const GroupParts& group, const AllGather& gather) const;

  /// What this rank's piece of an encoded parameter shows on all ranks, 1-D with padding; undefined where
  /// the parameter travels as its values.
  at::Tensor shown(const GroupParts& group, size_t param, const at::Tensor& piece) const;

 private:
  void encode(size_t param, const at::Tensor& piece, const at::Tensor& encoded) const;
  void read_encoded(const GroupParts& group, size_t param, const AllGather& gather, const at::Tensor& unsharded) const;

  Extensions extensions_;
  std::vector<at::ScalarType> dtypes_;
  std::vector<int64_t> encoded_bytes_;  // by parameter, without padding; 0: not encoded
  PieceLayout layout_;
};

}  // namespace fsdp
