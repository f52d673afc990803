#pragma once

#include <torch/torch.h>

namespace llama {

struct ModelConfig {
  int64_t vocabulary = 256;  ///< one token a byte
  int64_t layers = 4;
  int64_t dim = 128;
  int64_t heads = 4;
  int64_t context = 256;  ///< tokens a forward can see
  bool tied_output = false;

  /// Of the inner layer of SwiGLU: 8/3 of `dim`, rounded up to a multiple of 32.
  int64_t hidden_dim() const { return (dim * 8 / 3 + 31) / 32 * 32; }
};

/// x / sqrt(mean(x^2) + eps) * weight over the last dimension.
class RMSNormImpl : public torch::nn::Module {
 public:
  explicit RMSNormImpl(int64_t dim, double eps = 1e-5);
  torch::Tensor forward(const torch::Tensor& x);

  torch::Tensor weight;

 private:
  double eps_;
};
TORCH_MODULE(RMSNorm);

/// Causal attention with rotary positions.
class AttentionImpl : public torch::nn::Module {
 public:
  explicit AttentionImpl(const ModelConfig& config);
  /// x: [batch, tokens, dim]; cos, sin: [tokens, dim / heads / 2].
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& cos, const torch::Tensor& sin);

  torch::nn::Linear qkv = nullptr, output = nullptr;

 private:
  int64_t heads_;
};
TORCH_MODULE(Attention);

/// down(silu(gate(x)) * up(x)); gate and up are one matrix.
class SwiGLUImpl : public torch::nn::Module {
 public:
  explicit SwiGLUImpl(const ModelConfig& config);
  torch::Tensor forward(const torch::Tensor& x);

  torch::nn::Linear gate_up = nullptr, down = nullptr;
};
TORCH_MODULE(SwiGLU);

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const ModelConfig& config);
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& cos, const torch::Tensor& sin);

  RMSNorm attention_norm = nullptr, mlp_norm = nullptr;
  Attention attention = nullptr;
  SwiGLU mlp = nullptr;
};
TORCH_MODULE(Block);

/// A Llama-style language model over bytes. Plain LibTorch: it knows nothing of ranks or sharding.
class LanguageModelImpl : public torch::nn::Module {
 public:
  explicit LanguageModelImpl(const ModelConfig& config);
  /// tokens: [batch, tokens <= context], int64. Returns logits [batch, tokens, vocabulary].
  torch::Tensor forward(const torch::Tensor& tokens);

  const ModelConfig& config() const { return config_; }

  torch::nn::Embedding embedding = nullptr;
  torch::nn::ModuleList blocks = nullptr;
  RMSNorm norm = nullptr;
  torch::nn::Linear output = nullptr;  ///< empty if the output is tied to the embedding

 private:
  void initialise();

  ModelConfig config_;
  torch::Tensor cos_, sin_;
};
TORCH_MODULE(LanguageModel);

}  // namespace llama
