#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "fsdp/api.hpp"

namespace fsdp {

/// Encodes a parameter for its group's all-gather, to int8 for example (FullyShardOptions::all_gather_extension_fn).
///
/// Before an all-gather each rank encodes its piece into bytes; afterwards all ranks' bytes are decoded into the unsharded
/// parameter. The bytes are sent in the group's all-gather, with its other parameters, and statistics count them.
///
/// Only unsharded parameters have decoded values. Sharded parameters, gradients, optimizer state, checkpoints,
/// fsdp::full_tensor and fsdp::FullParameters have the exact ones. A write to an unsharded parameter changes the elements of
/// the shards that were written, and no others.
///
/// With an integer `reshard_after_forward`, backward gathers parts of forward's decoded values, not encoded again. A byte
/// budget counts a group's unsharded bytes, not the encoded ones. On one rank nothing is gathered or encoded, and results
/// equal the plain model's bit for bit.
///
/// One object may serve many parameters. A root calls it from one thread at a time, outside autograd.
class FSDP_API AllGatherExtension {
 public:
  virtual ~AllGatherExtension() = default;

  /// For messages, such as "int8 in blocks of 64".
  virtual std::string name() const = 0;

  /// Whether parameters of this dtype can be encoded; fully_shard throws UsageError for others. Default: floating-point dtypes.
  virtual bool accepts(at::ScalarType dtype) const { return at::isFloatingType(dtype); }

  /// The number of bytes that `numel` elements of `dtype` are encoded into. It may depend on the arguments only, as every rank
  /// computes from it what the others send.
  virtual int64_t encoded_bytes(int64_t numel, at::ScalarType dtype) const = 0;

  /// Encodes this rank's piece. The same piece has to give the same bytes, as backward gathers again.
  ///
  /// piece: 1-D, contiguous, in the sharded parameter's dtype and in the order of memory. It has the same number of elements on
  ///   every rank, at least one, padded with zeros.
  /// encoded: output, 1-D uint8, encoded_bytes() long, aligned to 16 bytes.
  virtual void pre_all_gather(const at::Tensor& piece, const at::Tensor& encoded) const = 0;

  /// Decodes the pieces of all ranks.
  ///
  /// encoded: (ranks, encoded_bytes()), uint8. Each row is contiguous and aligned to 16 bytes; there may be gaps between rows.
  /// dtype: the sharded parameter's.
  /// values: output, (ranks, elements of a piece), contiguous, in the unsharded parameter's dtype.
  virtual void post_all_gather(const at::Tensor& encoded, at::ScalarType dtype,
                               const at::Tensor& values) const = 0;
};

/// Gathers floating-point parameters as int8, with a float32 scale for each block of `block_numel` consecutive elements of a
/// piece: 1 + 4 / block_numel bytes an element. The last block may be shorter.
///
/// scale = (largest magnitude of the block) / 127, x' = scale * round(x / scale), computed in float32:
/// |x - x'| <= scale / 2, up to rounding in float32 and in the unsharded parameter's dtype. Zeros stay zeros. A block whose
/// largest magnitude is below 127 * FLT_MIN (1.5e-36) becomes zeros. A block with an infinity, a NaN or a double beyond
/// float32's range becomes NaN, so that the loss shows it.
///
/// Throws UsageError if block_numel is less than 1.
FSDP_API std::shared_ptr<AllGatherExtension> int8_all_gather(int64_t block_numel = 128);

}  // namespace fsdp
