#include "llama_model.hpp"

#include "fsdp/dtensor.hpp"
#include "fsdp/materialize.hpp"

namespace fsdp::bench {
namespace {

torch::nn::Linear without_bias(int64_t in, int64_t out) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
}

at::Tensor rotated(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const auto halves = x.chunk(2, -1);
  return at::cat({halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin}, -1);
}

/// While it lives, tensors that are made without a dtype have this one.
class InDtype {
 public:
  explicit InDtype(at::ScalarType dtype) : before_(at::get_default_dtype()) {
    at::set_default_dtype(at::scalarTypeToTypeMeta(dtype));
  }
  ~InDtype() { at::set_default_dtype(before_); }
  InDtype(const InDtype&) = delete;
  InDtype& operator=(const InDtype&) = delete;

 private:
  const caffe2::TypeMeta before_;
};

at::Tensor by_heads(const at::Tensor& x, int64_t heads) { return x.unflatten(-1, {heads, -1}).transpose(-3, -2); }

}  // namespace

RmsNormImpl::RmsNormImpl(int64_t dim) : weight(register_parameter("weight", torch::ones({dim}))) {}

at::Tensor RmsNormImpl::forward(const at::Tensor& x) { return at::rms_norm(x, {x.size(-1)}, weight); }

LlamaBlockImpl::LlamaBlockImpl(const LlamaSizes& sizes)
    : heads(sizes.heads),
      key_value_heads(sizes.heads * sizes.key_value / sizes.dim),
      attention_norm(register_module("attention_norm", RmsNorm(sizes.dim))),
      mlp_norm(register_module("mlp_norm", RmsNorm(sizes.dim))),
      q(register_module("q", without_bias(sizes.dim, sizes.dim))),
      k(register_module("k", without_bias(sizes.dim, sizes.key_value))),
      v(register_module("v", without_bias(sizes.dim, sizes.key_value))),
      out(register_module("out", without_bias(sizes.dim, sizes.dim))),
      gate(register_module("gate", without_bias(sizes.dim, sizes.hidden))),
      up(register_module("up", without_bias(sizes.dim, sizes.hidden))),
      down(register_module("down", without_bias(sizes.hidden, sizes.dim))) {}

at::Tensor LlamaBlockImpl::forward(at::Tensor x, const at::Tensor& cos, const at::Tensor& sin) {
  auto y = attention_norm(x);
  const auto attended = at::scaled_dot_product_attention(
      rotated(by_heads(q(y), heads), cos, sin), rotated(by_heads(k(y), key_value_heads), cos, sin),
      by_heads(v(y), key_value_heads), /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true, /*scale=*/std::nullopt,
      /*enable_gqa=*/heads != key_value_heads);
  x = x + out(attended.transpose(-3, -2).flatten(-2));
  y = mlp_norm(x);
  return x + down(at::silu(gate(y)) * up(y));
}

LlamaModelImpl::LlamaModelImpl(const LlamaSizes& sizes)
    : head_dim(sizes.dim / sizes.heads),
      embedding(register_module("embedding", torch::nn::Embedding(sizes.vocabulary, sizes.dim))),
      blocks(register_module("blocks", torch::nn::ModuleList())),
      norm(register_module("norm", RmsNorm(sizes.dim))),
      head(register_module("head", without_bias(sizes.dim, sizes.vocabulary))) {
  for (int64_t i = 0; i < sizes.blocks; ++i) blocks->push_back(LlamaBlock(sizes));
}

at::Tensor LlamaModelImpl::loss(const at::Tensor& tokens) {
  at::Tensor x = embedding(tokens);
  const auto on_device = at::TensorOptions(at::kFloat).device(tokens.device());
  const auto frequencies = at::pow(10000.0, -at::arange(0, head_dim, 2, on_device) / static_cast<double>(head_dim));
  const auto angles = at::outer(at::arange(tokens.size(-1), on_device), frequencies);
  const auto cos = angles.cos().to(x.scalar_type()), sin = angles.sin().to(x.scalar_type());
  for (const auto& block : *blocks) x = block->as<LlamaBlock>()->forward(x, cos, sin);
  return at::cross_entropy_loss(head(norm(x)).flatten(0, -2), tokens.flatten());
}

LlamaModel sharded_llama(const LlamaSizes& sizes, const DeviceMesh& mesh) {
  auto model = [&] {
    const MetaDevice meta;
    const InDtype bfloat16(at::kBFloat16);
    return LlamaModel(sizes);
  }();
  for (const auto& block : *model->blocks) fully_shard(*block, {.mesh = mesh});
  fully_shard(model, {.mesh = mesh, .reshard_after_forward = false});
  to_empty(model);
  const at::NoGradGuard no_grad;
  for (const auto& parameter : model->parameters()) to_local(parameter).normal_(0.0, 0.02);
  return model;
}

}  // namespace fsdp::bench
