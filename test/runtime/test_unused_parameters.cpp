#include <catch2/catch.hpp>

#include "support/models.hpp"

// Parameters that a step does not use.

namespace fsdp::test {
namespace {

TEST_CASE("a parameter that no rank used keeps an undefined gradient, as in the plain model",
          "[runtime][unused_parameters]") {
  auto make = [] {
    auto workload = chain_workload(4);
    auto model = std::dynamic_pointer_cast<ChainImpl>(workload.module);
    auto loss = workload.loss;
    workload.loss = [model, loss](Inputs& in) {
      model->skipped = in.step == 1 ? std::vector<size_t>{1, 2} : std::vector<size_t>{};
      return loss(in);
    };
    return workload;
  };
  trains_like_plain(make, {.steps = 4});
  trains_like_plain(make, {.world_size = 3, .steps = 4, .reshard_after_forward = false});
  trains_like_plain(make, {.world_size = 4, .replicas = 2, .steps = 4});
}

struct Half : torch::nn::Module {
  Half() {
    used = register_parameter("used", torch::randn({5, 3}));
    unused = register_parameter("unused", torch::randn({4}));
    later = register_parameter("later", torch::randn({5, 3}));
  }
  at::Tensor used, unused, later;
};

TEST_CASE("one group may hold used and unused parameters", "[runtime][unused_parameters]") {
  auto make = [] {
    auto net = std::make_shared<Half>();
    return Workload{.module = net,
                    .shard = [net](const FullyShardOptions& options) { fully_shard(*net, options); },
                    .loss = [net](Inputs& in) {
                      auto y = torch::matmul(in.normal({2, 5}), net->used);
                      if (in.step >= 2) y = y + torch::matmul(in.normal({2, 5}), net->later);
                      return y.square().mean();
                    }};
  };
  for (int world_size : {2, 3}) trains_like_plain(make, {.world_size = world_size, .steps = 4});
}

struct Experts : torch::nn::Module {
  Experts() {
    for (int i = 0; i < 3; ++i) weights.push_back(register_parameter(fmt::format("weight{}", i), torch::randn({3, 5})));
    always = register_module("always", torch::nn::Linear(5, 1));
    never = register_module("never", torch::nn::Linear(5, 1));
  }
  std::vector<at::Tensor> weights;
  torch::nn::Linear always{nullptr}, never{nullptr};
};

// All in one group, or two: what a rank gathers is a matter of groups, which all ranks must use alike.
TEST_CASE("with reduce_scatter_unused_params ranks may use different parameters, absent ones count as zero",
          "[runtime][unused_parameters]") {
  auto make = [] {
    auto net = std::make_shared<Experts>();
    return Workload{.module = net,
                    .shard =
                        [net](const FullyShardOptions& options) {
                          fully_shard(net->never, options);
                          fully_shard(*net, options);
                        },
                    .loss = [net](Inputs& in) {
                      auto weight = net->weights[(in.rank + in.step + in.micro_batch) % 2];  // the third never
                      return net->always->forward(torch::matmul(in.normal({2, 3}), weight)).square().mean();
                    }};
  };
  for (auto form : {Accumulation::kReduceEach, Accumulation::kSyncAtLast})
    trains_like_plain(make, {.steps = 4, .micro_batches = 2, .accumulation = form, .reduce_unused = true});
  trains_like_plain(make, {.world_size = 3, .steps = 4, .max_norm = 0.1, .reduce_unused = true});
  trains_like_plain(make, {.world_size = 4, .replicas = 2, .steps = 4, .reduce_unused = true});
}

struct HalfFrozen : torch::nn::Module {
  HalfFrozen() {
    always = register_parameter("always", torch::randn({5}));
    trained = register_parameter("trained", torch::randn({5}));
    frozen = register_parameter("frozen", torch::randn({5}), /*requires_grad=*/false);
  }
  at::Tensor always, trained, frozen;
};

// On one rank all gradients of a group arrive, on the other one is missing: the moment of the
// reduction must not depend on that.
TEST_CASE("with reduce_scatter_unused_params the order of reductions does not depend on which gradients came",
          "[runtime][unused_parameters]") {
  auto make = [] {
    auto net = std::make_shared<torch::nn::Module>();
    auto first = net->register_module("first", std::make_shared<HalfFrozen>());
    auto second = net->register_module("second", std::make_shared<HalfFrozen>());
    return Workload{.module = net,
                    .shard =
                        [net, first, second](const FullyShardOptions& options) {
                          fully_shard(*first, options);
                          fully_shard(*second, options);
                          fully_shard(*net, options);
                        },
                    .loss = [first, second](Inputs& in) {
                      auto use = [&](HalfFrozen& part, bool trains) {
                        // `always` first: a step begins with what records autograd, on all ranks alike
                        auto sum = (part.always * in.normal({5})).sum();
                        return sum + ((trains ? part.trained : part.frozen) * in.normal({5})).sum();
                      };
                      bool odd = (in.rank + in.step) % 2;
                      auto sum = use(*first, odd);
                      return sum + use(*second, !odd);
                    }};
  };
  trains_like_plain(make, {.steps = 4, .reduce_unused = true});
  trains_like_plain(make, {.world_size = 4, .replicas = 2, .steps = 4, .reduce_unused = true});
}

TEST_CASE("a backward that uses nothing of the model is no step at all", "[runtime][unused_parameters]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    chain.step(rank.index());
    rank.log().clear();
    auto other = torch::ones({2}, torch::requires_grad());
    (other * 2).sum().backward();
    rank.check(rank.log().calls.empty(), "nothing was communicated");
  });
}

TEST_CASE("several backwards reach different parameters of one group", "[runtime][unused_parameters]") {
  on_ranks(2, [](Rank& rank) {
    auto net = seeded(4, [] { return std::make_shared<Half>(); });
    fully_shard(*net, {.mesh = rank.mesh()});
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      (net->used * (rank.index() + 1.0)).sum().backward();
      rank.check_close(sharded(net->used).grad(), torch::full({rank.index() == 0 ? 3 : 2, 3}, 1.5), "first");
      rank.check(!sharded(net->later).grad().defined(), "not yet");
      (net->later * (rank.index() + 3.0)).sum().backward();
      rank.check_close(sharded(net->used).grad(), torch::full({rank.index() == 0 ? 3 : 2, 3}, 1.5), "still");
      rank.check_close(sharded(net->later).grad(), torch::full({rank.index() == 0 ? 3 : 2, 3}, 3.5), "second");
      rank.check(!sharded(net->unused).grad().defined(), "never");
    }
  });
}

}  // namespace
}  // namespace fsdp::test
