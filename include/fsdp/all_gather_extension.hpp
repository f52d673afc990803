#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

namespace fsdp {

/// How one parameter travels in its group's all-gather in another form than its values: quantised, say.
/// Chosen by FullyShardOptions::all_gather_extension_fn.
///
/// Before an all-gather every rank turns what it holds into bytes; afterwards what all ranks sent is
/// turned into the values that the unsharded parameter shows. The bytes travel in the group's one collective, beside
/// those of its other parameters, and statistics count them as they travel.
///
/// Sharded parameters, gradients, optimizer state and checkpoints stay as they are, and so do
/// fsdp::full_tensor and fsdp::FullParameters: they never see encoded values. A write through an unsharded parameter
/// reaches the shards as it was written; elements that still show what the all-gather gave keep the
/// value that the rank holds. With an integer `reshard_after_forward` the pieces that are kept are cut
/// from the values shown in forward, and backward gathers them as values. A byte budget weighs a group
/// by its unsharded bytes, not by what travels.
///
/// Where one rank holds the whole parameter nothing is gathered, so nothing is encoded: results equal the
/// plain model's bit for bit.
///
/// One object may serve many parameters, and is called by one thread of a root at a time, below autograd.
class AllGatherExtension {
 public:
  virtual ~AllGatherExtension() = default;

  /// For messages, such as "int8 in blocks of 64".
  virtual std::string name() const = 0;

  /// Whether a parameter that is kept in this dtype can be encoded; fully_shard throws UsageError where
  /// not. By default: floating-point dtypes.
  virtual bool accepts(at::ScalarType dtype) const { return at::isFloatingType(dtype); }

  /// Bytes that `numel` elements kept in `dtype` become. A function of the arguments alone: every rank
  /// knows from it what the others send.
  virtual int64_t encoded_bytes(int64_t numel, at::ScalarType dtype) const = 0;

  /// piece: what this rank holds, 1-D, contiguous, in the dtype that it is kept in and in the order of memory,
  ///   followed by zeros where others hold more: as many elements on every rank, one or more.
  /// encoded: 1-D bytes, encoded_bytes() long, to be written; its memory is aligned to 16.
  /// The same piece must give the same bytes: backward gathers again what forward has seen.
  virtual void pre_all_gather(const at::Tensor& piece, const at::Tensor& encoded) const = 0;

  /// encoded: (ranks, encoded_bytes()) bytes; each rank's are contiguous and aligned to 16, and others
  ///   may lie between them.
  /// dtype: that the piece was kept in.
  /// values: (ranks, elements of a piece), contiguous, in the dtype of the unsharded parameter, to be written.
  virtual void post_all_gather(const at::Tensor& encoded, at::ScalarType dtype,
                               const at::Tensor& values) const = 0;
};

/// Gathers floating-point parameters as int8, with one float32 scale for each `block_numel` consecutive
/// elements of a piece, which need not be a multiple: 1 + 4 / block_numel bytes an element.
///
/// scale = (largest magnitude of the block) / 127, x' = scale * round(x / scale), computed in float32:
/// |x - x'| <= scale / 2, but for rounding in float32 and in the unsharded parameter's dtype. Zeros stay zeros.
/// A block whose largest magnitude is below 127 * FLT_MIN (1.5e-36) becomes zeros. A block that holds an
/// infinity or a NaN, or a double beyond float32, becomes NaN throughout, so that it shows in the loss.
///
/// Throws UsageError if block_numel is less than 1.
std::shared_ptr<AllGatherExtension> int8_all_gather(int64_t block_numel = 128);

}  // namespace fsdp
