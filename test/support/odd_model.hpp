#pragma once

#include <functional>
#include <string>
#include <vector>

#include "support/ranks.hpp"
#include "support/twin.hpp"

namespace fsdp::test {

/// A Linear whose weight is somebody else's tensor.
struct HeadImpl : torch::nn::LinearImpl {
  using torch::nn::LinearImpl::LinearImpl;
  void tie(const at::Tensor& other) {
    weight = other;
    parameters_["weight"] = other;
  }
};
TORCH_MODULE(Head);

/// One of everything that is awkward about parameters: 0-dim, frozen, integers, channels-last, tied, sizes that no
/// world divides, buffers of two dtypes, and one to be ignored.
struct OddImpl : torch::nn::Cloneable<OddImpl> {
  OddImpl() { reset(); }
  void reset() override {
    using namespace torch::nn;
    embed = register_module("embed", Embedding(7, 5));
    conv = register_module("conv", Conv2d(Conv2dOptions(2, 3, 3)));
    conv->weight.set_data(conv->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
    norm = register_module("norm", BatchNorm1d(5));
    lin = register_module("lin", Linear(5, 5));
    head = register_module("head", Head(LinearOptions(5, 7)));
    head->tie(embed->weight);
    scale = register_parameter("scale", torch::full({}, 1.5));
    frozen = register_parameter("frozen", torch::randn({3, 5}), /*requires_grad=*/false);
    table = register_parameter("table", torch::arange(6).view({3, 2}), /*requires_grad=*/false);
    plain = register_parameter("plain", torch::linspace(-1, 1, 5));
    counts = register_buffer("counts", torch::arange(4));
  }
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& image) {
    auto x = embed->forward(tokens) + torch::mm(conv->forward(image).flatten(1), frozen);
    return head->forward(norm->forward(lin->forward(x) * scale) + plain);
  }
  at::Tensor loss(Inputs& in) {
    return forward(in.integers(7, {4}), in.normal({4, 2, 3, 3})).square().mean();
  }

  torch::nn::Embedding embed{nullptr};
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear lin{nullptr};
  Head head{nullptr};
  at::Tensor scale, frozen, table, plain, counts;
};
TORCH_MODULE(Odd);

inline Odd plain_odd(uint64_t seed = 7) {
  return seeded(seed, [] { return Odd(); });
}

/// A world and the mesh over it.
struct OddCase {
  std::string name;
  int world_size;
  int64_t replicas = 0;  ///< 0: a 1-D mesh
  bool replicate_only = false;
};

inline const std::vector<OddCase>& odd_cases() {
  static const std::vector<OddCase> cases{
      {"1 rank", 1},           {"2 ranks", 2},          {"3 ranks", 3}, {"5 ranks", 5},
      {"2 x 2 ranks", 4, 2}, {"2 replicas", 2, 0, true}, {"8 ranks", 8}};
  return cases;
}

/// Three groups: conv, lin, and the root with the rest; `plain` is ignored.
inline FSDPModule shard_odd(Odd& model, const Rank& rank, const OddCase& odd,
                            const MixedPrecisionPolicy& policy = {}) {
  FullyShardOptions options{.mesh = odd.replicas > 0 ? rank.hybrid(odd.replicas, rank.size() / odd.replicas)
                                                     : rank.mesh(),
                            .mp_policy = policy,
                            .replicate_only = odd.replicate_only};
  fully_shard(model->conv, options);
  fully_shard(model->lin, options);
  options.ignored_params = {model->plain};
  return fully_shard(model, options);
}

/// Runs `body(rank, case)` on every case.
inline void on_odd_cases(const std::function<void(Rank&, const OddCase&)>& body) {
  for (const auto& odd : odd_cases())
    on_ranks(odd.world_size, [&](Rank& rank) { body(rank, odd); });
}

}  // namespace fsdp::test
