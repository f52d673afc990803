#include "model.hpp"

#include <cmath>

namespace llama {
namespace {

torch::nn::Linear without_bias(int64_t in, int64_t out) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
}

/// Turns each pair (x[i], x[i + half]) of a head by its position's angle.
torch::Tensor rotate(const torch::Tensor& x, const torch::Tensor& cos, const torch::Tensor& sin) {
  const auto halves = x.chunk(2, -1);
  return torch::cat({halves[0] * cos - halves[1] * sin, halves[0] * sin + halves[1] * cos}, -1);
}

}  // namespace

RMSNormImpl::RMSNormImpl(int64_t dim, double eps) : eps_(eps) {
  weight = register_parameter("weight", torch::ones({dim}));
}

torch::Tensor RMSNormImpl::forward(const torch::Tensor& x) {
  return x * torch::rsqrt(x.square().mean(-1, /*keepdim=*/true) + eps_) * weight;
}

AttentionImpl::AttentionImpl(const ModelConfig& config) : heads_(config.heads) {
  qkv = register_module("qkv", without_bias(config.dim, 3 * config.dim));
  output = register_module("output", without_bias(config.dim, config.dim));
}

torch::Tensor AttentionImpl::forward(const torch::Tensor& x, const torch::Tensor& cos,
                                     const torch::Tensor& sin) {
  const int64_t batch = x.size(0), tokens = x.size(1), dim = x.size(2);
  // [3, batch, heads, tokens, dim of a head]
  const auto parts =
      qkv->forward(x).view({batch, tokens, 3, heads_, dim / heads_}).permute({2, 0, 3, 1, 4});
  const auto mixed = at::scaled_dot_product_attention(
      rotate(parts[0], cos, sin), rotate(parts[1], cos, sin), parts[2], /*attn_mask=*/{},
      /*dropout_p=*/0.0, /*is_causal=*/true);
  return output->forward(mixed.transpose(1, 2).reshape({batch, tokens, dim}));
}

SwiGLUImpl::SwiGLUImpl(const ModelConfig& config) {
  gate_up = register_module("gate_up", without_bias(config.dim, 2 * config.hidden_dim()));
  down = register_module("down", without_bias(config.hidden_dim(), config.dim));
}

torch::Tensor SwiGLUImpl::forward(const torch::Tensor& x) {
  const auto parts = gate_up->forward(x).chunk(2, -1);
  return down->forward(torch::silu(parts[0]) * parts[1]);
}

BlockImpl::BlockImpl(const ModelConfig& config) {
  attention_norm = register_module("attention_norm", RMSNorm(config.dim));
  attention = register_module("attention", Attention(config));
  mlp_norm = register_module("mlp_norm", RMSNorm(config.dim));
  mlp = register_module("mlp", SwiGLU(config));
}

torch::Tensor BlockImpl::forward(const torch::Tensor& x, const torch::Tensor& cos,
                                 const torch::Tensor& sin) {
  const auto attended = x + attention->forward(attention_norm->forward(x), cos, sin);
  return attended + mlp->forward(mlp_norm->forward(attended));
}

LanguageModelImpl::LanguageModelImpl(const ModelConfig& config) : config_(config) {
  embedding = register_module("embedding", torch::nn::Embedding(config.vocabulary, config.dim));
  blocks = register_module("blocks", torch::nn::ModuleList());
  for (int64_t layer = 0; layer < config.layers; ++layer) blocks->push_back(Block(config));
  norm = register_module("norm", RMSNorm(config.dim));
  if (!config.tied_output)
    output = register_module("output", without_bias(config.dim, config.vocabulary));

  const int64_t half = config.dim / config.heads / 2;
  const auto frequencies =
      torch::pow(10000.0, -torch::arange(half, torch::kDouble) / static_cast<double>(half));
  const auto angles = torch::outer(torch::arange(config.context, torch::kDouble), frequencies);
  cos_ = register_buffer("cos", angles.cos().to(torch::kFloat));
  sin_ = register_buffer("sin", angles.sin().to(torch::kFloat));
  initialise();
}

void LanguageModelImpl::initialise() {
  torch::NoGradGuard no_grad;
  for (auto& entry : named_parameters()) {
    auto& parameter = entry.value();
    if (parameter.dim() < 2) continue;  // the norms' weights, which start at one
    double deviation = 1.0 / std::sqrt(static_cast<double>(parameter.size(1)));
    // What is added to the residual stream, twice a block, must not grow with the depth.
    const auto& name = entry.key();
    if (name.ends_with("attention.output.weight") || name.ends_with("mlp.down.weight"))
      deviation /= std::sqrt(2.0 * static_cast<double>(config_.layers));
    parameter.normal_(0.0, deviation);
  }
}

torch::Tensor LanguageModelImpl::forward(const torch::Tensor& tokens) {
  const auto cos = cos_.narrow(0, 0, tokens.size(1)), sin = sin_.narrow(0, 0, tokens.size(1));
  auto x = embedding->forward(tokens);
  for (const auto& block : *blocks) x = block->as<Block>()->forward(x, cos, sin);
  x = norm->forward(x);
  return config_.tied_output ? torch::nn::functional::linear(x, embedding->weight)
                             : output->forward(x);
}

}  // namespace llama
