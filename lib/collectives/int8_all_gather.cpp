#include <ATen/ATen.h>

#include <limits>

#include "base/require.hpp"
#include "fsdp/all_gather_extension.hpp"

namespace fsdp {

namespace {

constexpr float kLargest = 127;
constexpr float kSmallestScale = std::numeric_limits<float>::min();  // below it a scale loses precision

/// Elements in blocks: the whole ones as rows, and what is left.
struct Blocks {
  Blocks(int64_t numel, int64_t block_numel)
      : whole(numel / block_numel), rest(numel % block_numel), count(whole + (rest > 0)), size(block_numel) {}
  int64_t whole, rest, count, size;
};

/// scale and q (int8) of blocks (..., elements) in float32, to `scales` (..., 1) and `quantised` (..., elements).
void quantise(const at::Tensor& values, const at::Tensor& scales, const at::Tensor& quantised) {
  auto largest = values.abs().amax({-1}, /*keepdim=*/true);
  const auto is_finite = largest.isfinite();
  auto scale = largest.div_(kLargest);
  scale.masked_fill_(scale.lt(kSmallestScale), 0);
  // Only where there is something to scale: 0 / 0 has no int8.
  const auto has_values = is_finite.logical_and(scale.gt(0));
  const auto divisor = at::where(has_values, scale, at::ones({}, scale.options()));
  const auto whole = at::where(has_values, values, at::zeros({}, values.options())).div_(divisor).round_();
  quantised.copy_(whole.clamp_(-kLargest, kLargest));
  scales.copy_(scale.masked_fill_(is_finite.logical_not(), std::numeric_limits<float>::quiet_NaN()));
}

/// One rank's bytes: a scale for each block, then int8 for each element.
class Int8AllGather final : public AllGatherExtension {
 public:
  explicit Int8AllGather(int64_t block_numel) : block_numel_(block_numel) {}

  std::string name() const override { return fmt::format("int8 in blocks of {}", block_numel_); }

  int64_t encoded_bytes(int64_t numel, at::ScalarType) const override {
    return scale_bytes(Blocks(numel, block_numel_)) + numel;
  }

  void pre_all_gather(const at::Tensor& piece, const at::Tensor& encoded) const override {
    const Blocks blocks(piece.numel(), block_numel_);
    const auto values = piece.to(at::kFloat);
    const auto scales = encoded.narrow(0, 0, scale_bytes(blocks)).view(at::kFloat).unsqueeze(-1);
    const auto quantised = encoded.narrow(0, scale_bytes(blocks), piece.numel()).view(at::kChar);
    const int64_t split = blocks.whole * blocks.size;
    if (blocks.whole > 0)
      quantise(values.narrow(0, 0, split).view({blocks.whole, blocks.size}), scales.narrow(0, 0, blocks.whole),
               quantised.narrow(0, 0, split).view({blocks.whole, blocks.size}));
    if (blocks.rest > 0)
      quantise(values.narrow(0, split, blocks.rest).unsqueeze(0), scales.narrow(0, blocks.whole, 1),
               quantised.narrow(0, split, blocks.rest).unsqueeze(0));
  }

  void post_all_gather(const at::Tensor& encoded, at::ScalarType, const at::Tensor& values) const override {
    const int64_t numel = values.size(1);
    const Blocks blocks(numel, block_numel_);
    const auto scales = encoded.narrow(1, 0, scale_bytes(blocks)).view(at::kFloat).unsqueeze(-1);
    const auto quantised = encoded.narrow(1, scale_bytes(blocks), numel).view(at::kChar);
    const int64_t split = blocks.whole * blocks.size;
    const auto in_blocks = [&](const at::Tensor& tensor) {
      return tensor.narrow(1, 0, split).unflatten(1, {blocks.whole, blocks.size});
    };
    if (blocks.whole > 0)
      in_blocks(values).copy_(in_blocks(quantised) * scales.narrow(1, 0, blocks.whole));
    if (blocks.rest > 0)
      values.narrow(1, split, blocks.rest)
          .copy_(quantised.narrow(1, split, blocks.rest) * scales.select(1, blocks.whole));
  }

 private:
  static int64_t scale_bytes(const Blocks& blocks) {
    return blocks.count * static_cast<int64_t>(sizeof(float));
  }
  int64_t block_numel_;
};

}  // namespace

std::shared_ptr<AllGatherExtension> int8_all_gather(int64_t block_numel) {
  require(block_numel >= 1, "int8_all_gather: expected blocks of 1 element or more, found {}", block_numel);
  return std::make_shared<Int8AllGather>(block_numel);
}

}  // namespace fsdp
