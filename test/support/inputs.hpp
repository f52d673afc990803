#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <optional>

#include "support/device_ranks.hpp"

namespace fsdp::test {

/// The batch of one rank, step and micro-batch: the same numbers for the plain and the sharded
/// model, drawn from a generator of its own because ranks that are threads share LibTorch's.
class Inputs {
 public:
  /// given_in: the dtype that they are cast to; none: the one they are drawn in.
  Inputs(int rank, int step, int micro_batch = 0, at::ScalarType dtype = at::kFloat,
         std::optional<at::ScalarType> given_in = {})
      : rank(rank), step(step), micro_batch(micro_batch), dtype_(dtype), given_in_(given_in.value_or(dtype)),
        generator_(at::make_generator<at::CPUGeneratorImpl>(seed())) {}

  at::Tensor normal(at::IntArrayRef sizes) {
    return torch::randn(sizes, generator_, at::TensorOptions(dtype_)).to(test_device(), given_in_);
  }
  at::Tensor integers(int64_t high, at::IntArrayRef sizes) {
    return torch::randint(0, high, sizes, generator_, at::TensorOptions(at::kLong)).to(test_device());
  }
  /// As if nothing had been drawn.
  void rewind() { generator_.set_current_seed(seed()); }
  at::ScalarType dtype() const { return given_in_; }
  /// What they are drawn from: to be preserved where a part that draws is recomputed.
  const at::Generator& generator() const { return generator_; }

  const int rank, step, micro_batch;

 private:
  uint64_t seed() const { return static_cast<uint64_t>(1 + rank + 100 * step + 10000 * micro_batch); }

  at::ScalarType dtype_, given_in_;
  at::Generator generator_;
};

}  // namespace fsdp::test
