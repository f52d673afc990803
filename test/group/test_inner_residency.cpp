#include <catch2/catch.hpp>

#include <ATen/core/LegacyTypeDispatch.h>

#include <atomic>

#include "dispatch/host_lock.hpp"
#include "dispatch/residency.hpp"
#include "support/models.hpp"

// Unsharded parameters inside a wrapper subclass, whose operators run below the residency key: see Note [Inner residency key].

namespace fsdp::test {
namespace {

using at::Tensor;

/// As inside __torch_dispatch__.
struct InTorchDispatch {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_residency{kResidencyKey};
};

Tensor inner_tensor(const Tensor& handle) {
  auto alias = handle.detach();
  add_inner_residency_key(alias);
  return alias;
}

/// Operators with a kernel for each backend, made of others, and both; each by itself, on released parameters.
std::vector<Tensor> results(const Tensor& weight, const Tensor& bias, const Tensor& x,
                            const std::function<void()>& release) {
  std::vector<Tensor> found;
  const auto add = [&](const auto& compute) {
    release();
    found.push_back(compute());
  };
  add([&] { return at::mm(x, weight.t()); });
  add([&] { return at::linear(x, weight, bias); });
  add([&] { return at::layer_norm(x, {6}, bias, bias); });
  add([&] { return std::get<0>(at::native_layer_norm(x, {6}, bias, bias, 1e-5)); });
  add([&] { return at::embedding(weight, at::arange(3)); });
  add([&] { return at::zeros_like(weight).copy_(weight); });
  add([&] { return weight.t().contiguous(); });
  add([&] { return at::cat({weight, weight}); });
  add([&] { return weight.view({-1}).narrow(0, 3, 5).clone(); });
  add([&] { return weight.to(at::kDouble); });
  add([&] { return at::matmul(x.unsqueeze(0), weight) + bias; });
  return found;
}

TEST_CASE("operators on an inner tensor gather, and compute as without", "[group][inner_residency]") {
  on_ranks(2, [](Rank& rank) {
    const auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    const auto x = at::arange(24, at::kFloat).view({4, 6}).sin();
    const auto& layer = *chain.model->layers[0];
    const auto weight = inner_tensor(layer.weight), bias = inner_tensor(layer.bias);
    const InTorchDispatch inside;
    const auto expected = results(plain->layers[0]->weight, plain->layers[0]->bias, x, [] {});
    const auto found = results(weight, bias, x, [&] { chain.layers[0].reshard(); });
    for (size_t i = 0; i < expected.size(); ++i)
      rank.check(at::equal(found[i], expected[i]), fmt::format("operator {}", i));
    rank.check_equal(rank.subjects_of("all_gather").size(), expected.size(), "a gather for each");
  });
}

TEST_CASE("writes through an inner tensor reach the shards", "[group][inner_residency]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    const auto weight = inner_tensor(chain.model->layers[0]->weight);
    {
      const InTorchDispatch inside;
      weight.fill_(3);
    }
    chain.layers[0].reshard();
    at::NoGradGuard no_grad;
    rank.check(at::equal(chain.model->layers[0]->weight.clone(), at::full({6, 6}, 3.0)), "written");
  });
}

TEST_CASE("a host lock is given up while an operator waits", "[group][inner_residency]") {
  static std::atomic<int> released = 0, acquired = 0;
  static const HostLock lock = {
      .release =
          [] {
            ++released;
            return static_cast<void*>(&released);
          },
      .acquire = [](void*) { ++acquired; },
      .ensure = []() -> void* { return nullptr; },
      .let_go = [](void*) {},
  };
  set_host_lock(&lock);
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    at::NoGradGuard no_grad;
    const auto norm = chain.model->layers[0]->weight.norm();
    rank.check(at::equal(norm, plain_chain()->layers[0]->weight.norm()), "the whole parameter's");
  });
  set_host_lock(nullptr);
  CHECK(released == 2);
  CHECK(acquired == released);
}

}  // namespace
}  // namespace fsdp::test
