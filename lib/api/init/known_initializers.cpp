#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformer.h>

#include <cmath>

#include "api/init/init_run.hpp"

// What LibTorch's own classes do in reset_parameters(). Transformer layers,
// AdaptiveLogSoftmaxWithLoss and other compositions are made of these and need no rule of their
// own.
namespace fsdp {

namespace {

using namespace torch::nn;

/// 1 / sqrt(n), or 0 where there is nothing to add up.
double reciprocal_root(int64_t n) { return n > 0 ? 1 / std::sqrt(static_cast<double>(n)) : 0; }

/// Linear and all convolutions. Kaiming's rule with a = sqrt(5) is this bound.
template <class Impl>
void init_affine(Impl& module, Initializer& init) {
  const double bound = reciprocal_root(fans_of(init.sizes(module.weight)).in);
  init.uniform_(module.weight, -bound, bound);
  init.uniform_(module.bias, -bound, bound);
}

void init_bilinear(BilinearImpl& module, Initializer& init) {
  const double bound = reciprocal_root(init.sizes(module.weight)[1]);
  init.uniform_(module.weight, -bound, bound);
  init.uniform_(module.bias, -bound, bound);
}

/// LibTorch's EmbeddingBag writes the padding row before the others, and so not at all; here it is
/// zero in both.
template <class Impl>
void init_embedding(Impl& module, Initializer& init) {
  init.normal_(module.weight);
  const auto padding = module.options.padding_idx();
  if (!padding) return;
  const auto sizes = init.sizes(module.weight);
  const int64_t row = *padding < 0 ? *padding + sizes[0] : *padding;
  init.fill_range_(module.weight, {row * sizes[1], (row + 1) * sizes[1]}, 0);
}

template <class Impl>
void init_norm(Impl& module, Initializer& init) {
  init.ones_(module.weight);
  init.zeros_(module.bias);
}

template <class Impl>
void init_norm_with_statistics(Impl& module, Initializer& init) {
  init_norm(module, init);
  init.zeros_(module.running_mean);
  init.ones_(module.running_var);
  init.zeros_(module.num_batches_tracked);
}

template <class Impl>
void init_recurrent(Impl& module, Initializer& init) {
  const double bound = reciprocal_root(module.options_base.hidden_size());
  for (const auto& parameter : module.parameters(/*recurse=*/false))
    init.uniform_(parameter, -bound, bound);
}

void init_attention(MultiheadAttentionImpl& module, Initializer& init) {
  for (const auto* weight : {&module.in_proj_weight, &module.q_proj_weight, &module.k_proj_weight,
                             &module.v_proj_weight})
    init.xavier_uniform_(*weight);
  if (module.in_proj_bias.defined()) {
    init.zeros_(module.in_proj_bias);
    init.zeros_(module.out_proj->bias);
  }
  init.xavier_normal_(module.bias_k);
  init.xavier_normal_(module.bias_v);
}

void init_transformer(TransformerImpl& module, Initializer& init) {
  for (const auto& parameter : module.parameters())
    if (init.sizes(parameter).size() > 1) init.xavier_uniform_(parameter);
}

template <class... Impls>
void add_affine(std::vector<ModuleInitializer>& known) {
  (known.push_back(initializer<Impls>(&init_affine<Impls>)), ...);
}
template <class... Impls>
void add_recurrent(std::vector<ModuleInitializer>& known) {
  (known.push_back(initializer<Impls>(&init_recurrent<Impls>)), ...);
}
template <class... Impls>
void add_norm_with_statistics(std::vector<ModuleInitializer>& known) {
  (known.push_back(initializer<Impls>(&init_norm_with_statistics<Impls>)), ...);
}

std::vector<ModuleInitializer> make_known() {
  std::vector<ModuleInitializer> known;
  add_affine<LinearImpl, Conv1dImpl, Conv2dImpl, Conv3dImpl, ConvTranspose1dImpl,
             ConvTranspose2dImpl, ConvTranspose3dImpl>(known);
  known.push_back(initializer<BilinearImpl>(&init_bilinear));
  known.push_back(initializer<EmbeddingImpl>(&init_embedding<EmbeddingImpl>));
  known.push_back(initializer<EmbeddingBagImpl>(&init_embedding<EmbeddingBagImpl>));
  known.push_back(initializer<LayerNormImpl>(&init_norm<LayerNormImpl>));
  known.push_back(initializer<GroupNormImpl>(&init_norm<GroupNormImpl>));
  add_norm_with_statistics<BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl, InstanceNorm1dImpl,
                           InstanceNorm2dImpl, InstanceNorm3dImpl>(known);
  add_recurrent<RNNImpl, LSTMImpl, GRUImpl, RNNCellImpl, LSTMCellImpl, GRUCellImpl>(known);
  known.push_back(initializer<MultiheadAttentionImpl>(&init_attention));
  known.push_back(initializer<TransformerImpl>(&init_transformer));
  known.push_back(initializer<PReLUImpl>([](PReLUImpl& module, Initializer& init) {
    init.constant_(module.weight, module.options.init());
  }));
  return known;
}

}  // namespace

const std::vector<ModuleInitializer>& known_initializers() {
  static const auto known = make_known();
  return known;
}

}  // namespace fsdp
