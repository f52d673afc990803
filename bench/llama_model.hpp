#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

#include "fsdp/fully_shard.hpp"

namespace fsdp::bench {

/// Sizes of the model below; the same fields as in bench/pytorch/models.py, whose LlamaModel it is the twin of.
struct LlamaSizes {
  int64_t blocks = 16;
  int64_t dim = 2048;
  int64_t hidden = 8192;
  int64_t vocabulary = 32768;
  int64_t heads = 16;
  int64_t key_value = 2048;  ///< rows of the key and value projections
};

/// A weight alone, as torch.nn.RMSNorm.
struct RmsNormImpl : torch::nn::Module {
  explicit RmsNormImpl(int64_t dim);
  at::Tensor forward(const at::Tensor& x);
  at::Tensor weight;
};
TORCH_MODULE(RmsNorm);

/// Nine parameters.
struct LlamaBlockImpl : torch::nn::Module {
  explicit LlamaBlockImpl(const LlamaSizes& sizes);
  at::Tensor forward(at::Tensor x, const at::Tensor& cos, const at::Tensor& sin);

  int64_t heads = 0, key_value_heads = 0;
  RmsNorm attention_norm{nullptr}, mlp_norm{nullptr};
  torch::nn::Linear q{nullptr}, k{nullptr}, v{nullptr}, out{nullptr}, gate{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(LlamaBlock);

struct LlamaModelImpl : torch::nn::Module {
  explicit LlamaModelImpl(const LlamaSizes& sizes);
  /// Mean cross-entropy of predicting `tokens`, [rows, columns], from themselves.
  at::Tensor loss(const at::Tensor& tokens);

  int64_t head_dim = 0;
  torch::nn::Embedding embedding{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  RmsNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(LlamaModel);

/// Made on meta in bfloat16, every block sharded and then the root, which keeps its own parameters between forward and
/// backward; this rank's shards are small random numbers.
LlamaModel sharded_llama(const LlamaSizes& sizes, const DeviceMesh& mesh);

}  // namespace fsdp::bench
