#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <string>

#include "fsdp/fully_shard.hpp"

namespace fsdp::bench {

/// Sizes of the model below; the same fields as in bench/pytorch/models.py, whose twin it is.
struct MlpSizes {
  int64_t blocks = 24;
  int64_t dim = 512;
  int64_t hidden = 2048;
  int64_t vocabulary = 512;
};

/// x + down(gelu(up(norm(x)))): six parameters.
struct MlpBlockImpl : torch::nn::Module {
  explicit MlpBlockImpl(const MlpSizes& sizes);
  at::Tensor forward(const at::Tensor& x);

  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(MlpBlock);

/// Embedding, blocks, norm, and a head; knows nothing of sharding.
struct MlpModelImpl : torch::nn::Module {
  explicit MlpModelImpl(const MlpSizes& sizes);
  /// Mean cross-entropy of predicting `tokens` from themselves.
  at::Tensor loss(const at::Tensor& tokens);

  torch::nn::Embedding embedding{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(MlpModel);

/// Shards every block, then the root, which keeps its own parameters between forward and backward.
FSDPModule shard(MlpModel& model, const DeviceMesh& mesh, bool reshard_after_forward = true);

/// Bytes that this rank holds of the parameters of `module` and its submodules.
int64_t parameter_bytes(const torch::nn::Module& module);

}  // namespace fsdp::bench
