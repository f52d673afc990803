#include <catch2/catch.hpp>

#include "support/models.hpp"

// Operators on sharded parameters.

namespace fsdp::test {
namespace {

TEST_CASE("an L2 penalty over parameters() is right", "[runtime][sharded_params]") {
  auto make = [] {
    auto workload = chain_workload();
    auto model = std::dynamic_pointer_cast<ChainImpl>(workload.module);
    auto loss = workload.loss;
    workload.loss = [model, loss](Inputs& in) {
      auto total = loss(in);
      for (auto& parameter : model->parameters()) total = total + 0.01 * parameter.square().sum();
      return total;
    };
    return workload;
  };
  for (int world_size : {2, 3}) trains_like_plain(make, {.world_size = world_size});
  trains_like_plain(make, {.world_size = 4, .replicas = 2, .micro_batches = 2});
}

TEST_CASE("a penalty over parameters() before the forward, and one alone", "[runtime][sharded_params]") {
  auto make = [] {
    auto workload = chain_workload();
    auto model = std::dynamic_pointer_cast<ChainImpl>(workload.module);
    auto loss = workload.loss;
    workload.loss = [model, loss](Inputs& in) {
      std::vector<at::Tensor> squares;
      for (auto& parameter : model->parameters()) squares.push_back(parameter.square().sum());
      auto penalty = torch::stack(squares).sum();
      return in.step == 1 ? penalty : penalty * 0.01 + loss(in);
    };
    return workload;
  };
  for (int world_size : {2, 3}) trains_like_plain(make, {.world_size = world_size});
}

TEST_CASE("a list of sharded parameters in one operator", "[runtime][sharded_params]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    auto joined = [](Chain& model) {
      std::vector<at::Tensor> weights;
      for (auto& layer : model->layers) weights.push_back(layer->named_parameters()["weight"]);
      return torch::cat(weights);
    };
    auto full = joined(plain), found = joined(chain.model);
    rank.check_identical(found.detach(), full.detach(), "values");
    (found * full.detach()).sum().backward();
    for (int i = 0; i < 3; ++i)
      rank.check_close(sharded(chain.model->layers[i]->weight).grad(),
                       rows_of(plain->layers[i]->weight.detach(), rank.index(), 2), "gradient");
  });
}

TEST_CASE("without autograd an operator on a parameter computes what it does on the whole, and communicates only what it must",
          "[runtime][sharded_params]") {
  on_ranks(3, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    auto parameter = sharded(chain.model->layers[0]->weight);
    const auto whole = plain->layers[0]->weight.detach();
    const auto rows = rows_of(whole, rank.index(), 3);
    {
      at::NoGradGuard no_grad;
      rank.check(is_dtensor(parameter.clone()), "clone is a DTensor");
      rank.check_identical(parameter.clone(), rows, "clone");
      parameter.mul_(1);
      rank.check(rank.log().calls.empty(), fmt::format("communicated: {}", rank.calls()));
      rank.check_close(parameter.norm(), whole.norm(), "norm");
      rank.check_equal(rank.calls().size(), size_t{1}, "a norm is one collective");
      rank.log().clear();
    }
    rank.check_identical(parameter.detach(), rows, "detach, with autograd on");
    rank.check_equal(parameter.detach().sizes().vec(), whole.sizes().vec(), "its sizes");
    rank.check_identical(parameter.data(), rows, "data");
    rank.check_equal(parameter.data().sizes().vec(), whole.sizes().vec(), "sizes of data");
    rank.check(rank.log().calls.empty(), fmt::format("communicated: {}", rank.calls()));
  });
}

TEST_CASE("beside a DTensor all ranks gather what a view of an unsharded parameter shows, those without rows too",
          "[runtime][sharded_params]") {
  on_ranks(3, [](Rank& rank) {
    auto plain = plain_chain(1, 5);
    ShardedChain chain(rank.mesh(), 1, 5);
    const auto& weight = chain.model->head->weight;  // of 2 rows
    const auto gradient = averaged_gradients(plain, 3)[2].second;
    chain.loss(rank.index(), 0).backward();
    at::NoGradGuard no_grad;
    rank.check_close(full_tensor(sharded(weight).grad().t() + weight.t()), (gradient + plain->head->weight).t(), "the sum");
  });
}

TEST_CASE("in a scope an operator on a sharded parameter sees the whole", "[runtime][sharded_params]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    at::NoGradGuard no_grad;
    auto scope = forward_scope(chain.root[0]);
    rank.check_identical(sharded(chain.model->layers[0]->weight) * 1, plain->layers[0]->weight * 1, "the whole");
  });
}

TEST_CASE("optimizers with and without closures, foreach or not, update the shards", "[runtime][sharded_params]") {
  on_ranks(2, [](Rank& rank) {
    auto train = [&](auto make_optimizer, const std::string& what) {
      auto plain = plain_chain();
      ShardedChain chain(rank.mesh());
      auto plain_optimizer = make_optimizer(plain->parameters());
      auto optimizer = make_optimizer(chain.model->parameters());
      for (int step = 0; step < 3; ++step) {
        auto expected = averaged_gradients(plain, 2, step);
        for (size_t i = 0; i < expected.size(); ++i) plain->parameters()[i].mutable_grad() = expected[i].second;
        chain.model->zero_grad();
        chain.loss(rank.index(), step).backward();
        optimizer->step();
        plain_optimizer->step();
        auto full = unique_parameters(*plain), found = unique_parameters(*chain.model);
        for (size_t i = 0; i < full.size(); ++i)
          rank.check_close(found[i].second.detach(), rows_of(full[i].second.detach(), rank.index(), 2),
                           fmt::format("{}, step {}: {}", what, step, full[i].first));
      }
    };
    using Tensors = std::vector<at::Tensor>;
    namespace optim = torch::optim;
    train([](Tensors p) { return std::make_unique<optim::SGD>(p, optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.1)); },
          "SGD");
    train([](Tensors p) { return std::make_unique<optim::Adam>(p, optim::AdamOptions(0.01).eps(1e-2)); }, "Adam");
    train([](Tensors p) { return std::make_unique<optim::Adagrad>(p, optim::AdagradOptions(0.01).eps(1e-2)); }, "Adagrad");
    train([](Tensors p) { return std::make_unique<optim::RMSprop>(p, optim::RMSpropOptions(0.01).eps(1e-2)); }, "RMSprop");
  });
}

}  // namespace
}  // namespace fsdp::test
