#include <catch2/catch.hpp>

#include <map>

#include "support/models.hpp"

// What fsdp::Initializer draws.

namespace fsdp::test {
namespace {

namespace nn = torch::nn;
using at::Tensor;

TEST_CASE("random numbers are Philox4x32-10's", "[runtime][initializers]") {
  // The known answers of Random123, the authors' own implementation.
  ElementRandom zero(0, 0, 0);
  for (uint32_t word : {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}) CHECK(zero.bits() == word);
  ElementRandom pi(/*seed=*/0x299f31d0a4093822, /*stream=*/0x0370734413198a2e, /*element=*/0x85a308d3243f6a88 >> 4);
  for (int i = 0; i < 32; ++i) pi.bits();  // the counter ends with 8: the element's ninth block
  for (uint32_t word : {0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}) CHECK(pi.bits() == word);
}

/// n values of a distribution, by an initialiser of one parameter.
template <class Function>
Tensor drawn(int64_t n, Function function) {
  struct One : nn::Module {
    explicit One(int64_t n) { weight = register_parameter("weight", torch::zeros({n})); }
    Tensor weight;
  };
  One one(n);
  init_parameters(one, {.initializers = {initializer<One>(
                            [&](One& module, Initializer& init) { function(init, module.weight); })}});
  return one.weight.detach().to(at::kDouble);
}

TEST_CASE("distributions have their moments and bounds, and neighbours are independent", "[runtime][initializers]") {
  constexpr int64_t n = 200000;
  const auto near = [](const Tensor& value, double expected) {
    CHECK(value.item<double>() == Approx(expected).margin(0.02));
  };
  const auto uniform = drawn(n, [](Initializer& init, Tensor& w) { init.uniform_(w, -1, 3); });
  near(uniform.mean(), 1);
  near(uniform.std(), 4 / std::sqrt(12.0));
  CHECK((uniform.min().item<double>() >= -1 && uniform.max().item<double>() <= 3));
  const auto normal = drawn(n, [](Initializer& init, Tensor& w) { init.normal_(w, 2, 0.5); });
  near(normal.mean(), 2);
  near(normal.std(), 0.5);
  near(((normal - 2) / 0.5).pow(4).mean() / 10, 0.3);
  const auto cut = drawn(n, [](Initializer& init, Tensor& w) { init.trunc_normal_(w, 0.5, 1, -0.5, 1); });
  CHECK((cut.min().item<double>() >= -0.5 && cut.max().item<double>() <= 1));
  // The same by throwing away what lies outside.
  const auto kept = normal.sub(2).div(0.5).add(0.5);
  const auto inside = kept.masked_select((kept >= -0.5).logical_and(kept <= 1));
  near(cut.mean(), inside.mean().item<double>());
  near(cut.std(), inside.std().item<double>());
  const auto standard = (normal - 2) / 0.5;
  near((standard.narrow(0, 0, n - 1) * standard.narrow(0, 1, n - 1)).mean(), 0);
}

/// LibTorch's values of a module and ours have the same mean and deviation, up to chance.
void check_like_libtorch(const std::shared_ptr<nn::Module>& module) {
  std::map<std::string, Tensor> expected;
  for (const auto& item : module->named_parameters()) expected[item.key()] = item.value().detach().clone();
  for (const auto& item : module->named_buffers()) expected[item.key()] = item.value().clone();
  init_parameters(*module, {.seed = 5});
  for (const auto& item : module->named_parameters()) {
    INFO(module->name() << " " << item.key());
    const auto ours = item.value().detach(), plain = expected[item.key()];
    const double n = static_cast<double>(ours.numel());
    const double deviation = n > 1 ? plain.std().item<double>() : 0;
    if (deviation == 0) {
      CHECK(ours.equal(plain));
      continue;
    }
    CHECK(ours.mean().item<double>() == Approx(plain.mean().item<double>()).margin(8 * deviation / std::sqrt(n)));
    CHECK(ours.std().item<double>() / deviation == Approx(1).margin(6 / std::sqrt(n)));
    CHECK(ours.abs().max().item<double>() <= plain.abs().max().item<double>() * (1 + 40 / n) + 3 * deviation);
    CHECK(!ours.equal(plain));
  }
  for (const auto& buffer : module->named_buffers()) CHECK(buffer.value().equal(expected[buffer.key()]));
}

TEST_CASE("LibTorch's classes get the values of their reset_parameters", "[runtime][initializers]") {
  using namespace torch::nn;
  const std::vector<std::shared_ptr<Module>> modules = seeded(2, [] {
    return std::vector<std::shared_ptr<Module>>{
        Linear(200, 150).ptr(), Bilinear(20, 30, 40).ptr(), Conv1d(40, 50, 5).ptr(), Conv2d(16, 32, 5).ptr(),
        Conv3d(Conv3dOptions(8, 8, 3).groups(2)).ptr(), ConvTranspose1d(40, 50, 5).ptr(),
        ConvTranspose2d(16, 32, 5).ptr(), ConvTranspose3d(8, 8, 3).ptr(), Embedding(300, 40).ptr(),
        EmbeddingBag(300, 40).ptr(), LayerNorm(LayerNormOptions({30})).ptr(), GroupNorm(GroupNormOptions(3, 30)).ptr(),
        BatchNorm1d(30).ptr(), BatchNorm2d(30).ptr(), BatchNorm3d(BatchNorm3dOptions(30).affine(false)).ptr(),
        InstanceNorm1d(InstanceNorm1dOptions(30).affine(true).track_running_stats(true)).ptr(),
        InstanceNorm2d(InstanceNorm2dOptions(30).affine(true)).ptr(), InstanceNorm3d(30).ptr(),
        RNN(60, 80).ptr(), LSTM(LSTMOptions(60, 80).bidirectional(true).proj_size(20)).ptr(),
        GRU(GRUOptions(60, 80).num_layers(2)).ptr(), RNNCell(60, 80).ptr(), LSTMCell(60, 80).ptr(), GRUCell(60, 80).ptr(),
        MultiheadAttention(MultiheadAttentionOptions(128, 4).add_bias_kv(true)).ptr(),
        MultiheadAttention(MultiheadAttentionOptions(128, 4).kdim(64).vdim(32)).ptr(),
        TransformerEncoderLayer(64, 2).ptr(), TransformerDecoderLayer(64, 2).ptr(),
        Transformer(TransformerOptions(64, 2, 1, 1).dim_feedforward(96)).ptr(),
        AdaptiveLogSoftmaxWithLoss(AdaptiveLogSoftmaxWithLossOptions(64, 100, {20, 60})).ptr(),
        PReLU(PReLUOptions().num_parameters(4).init(0.3)).ptr()};
  });
  for (const auto& module : modules) check_like_libtorch(module);
}

TEST_CASE("values that are drawn between two uses of a module are what the second one reads", "[runtime][initializers]") {
  const InitOptions fives{.initializers = {initializer<nn::LinearImpl>(
                              [](nn::LinearImpl& module, Initializer& init) { init.constant_(module.weight, 5); })}};
  for (const bool in_scope : {false, true})
    CHECK(on_ranks(2, [&](Rank& rank) {
      auto model = nn::Linear(nn::LinearOptions(4, 4).bias(false));
      const auto fsdp_model = fully_shard(model, {.mesh = rank.mesh()});
      std::optional<at::NoGradGuard> no_grad;
      std::optional<ForwardScope> scope;
      if (in_scope) {
        no_grad.emplace();
        scope.emplace(fsdp_model);
      }
      const auto input = torch::ones({1, 4});
      model->forward(input);
      init_parameters(model, fives);
      rank.check_identical(model->forward(input).detach(), torch::full({1, 4}, 20.0), "behind init_parameters");
    }));
}

}  // namespace
}  // namespace fsdp::test
