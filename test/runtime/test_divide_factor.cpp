#include <catch2/catch.hpp>

#include "support/models.hpp"

// What gradients are divided by.

namespace fsdp::test {
namespace {

TEST_CASE("gradients are averaged over the data-parallel world by default", "[runtime][divide_factor]") {
  on_ranks(4, [](Rank& rank) {
    for (auto mesh : {rank.mesh(), rank.hybrid(2, 2), rank.hybrid(4, 1)}) {
      auto net = seeded(5, [] { return torch::nn::Linear(1, 4); });
      fully_shard(net, {.mesh = mesh});
      (net->forward(torch::ones({1, 1})) * (rank.index() + 1.0)).sum().backward();
      rank.check_close(grad_dtensor_of(net->weight).full_tensor(), torch::full({4, 1}, 2.5), mesh.to_string());
    }
  });
}

TEST_CASE("a divide factor replaces the world's size, for the module and for all below", "[runtime][divide_factor]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    for (bool forced_sum : {false, true}) {
      ShardedChain chain(rank.mesh());
      auto modules = chain.root[0].sharded_modules();
      for (auto& module : modules) {
        module.set_gradient_divide_factor(4);
        if (forced_sum) module.set_force_sum_reduction_for_comms(true);
      }
      chain.loss(rank.index(), 0).backward();
      check_gradients(rank, *chain.model, averaged_gradients(plain, 2), "divided by 4", 0.5);
    }
  });
}

TEST_CASE("a divide factor of 1 gives the sum, across replicas too", "[runtime][divide_factor]") {
  on_ranks(4, [](Rank& rank) {
    auto net = seeded(5, [] { return torch::nn::Linear(1, 4); });
    fully_shard(net, {.mesh = rank.hybrid(2, 2)}).set_gradient_divide_factor(1);
    (net->forward(torch::ones({1, 1})) * (rank.index() + 1.0)).sum().backward();
    rank.check_close(grad_dtensor_of(net->weight).full_tensor(), torch::full({4, 1}, 10.0), "1 + 2 + 3 + 4");
  });
}

TEST_CASE("a divide factor that is not positive is an error", "[runtime][divide_factor]") {
  on_ranks(2, [](Rank& rank) {
    auto net = seeded(5, [] { return torch::nn::Linear(1, 4); });
    auto module = fully_shard(net, {.mesh = rank.mesh()});
    rank.check_throws<UsageError>([&] { module.set_gradient_divide_factor(0); }, {"0"}, "zero");
  });
}

}  // namespace
}  // namespace fsdp::test
