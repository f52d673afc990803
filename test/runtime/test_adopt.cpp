#include <catch2/catch.hpp>

#include "support/models.hpp"

// Optimizers built before fully_shard.

namespace fsdp::test {
namespace {

template <class Make>
void adopted_optimizer_continues(Rank& rank, Make make_optimizer, bool trained_before, const std::string& what) {
  auto plain = plain_chain(3, 5), model = plain_chain(3, 5);
  auto plain_optimizer = make_optimizer(plain->parameters());
  auto optimizer = make_optimizer(model->parameters());
  auto plain_step = [&](Chain& chain, torch::optim::Optimizer& with, int step) {
    auto gradients = averaged_gradients(chain, 2, step);
    for (size_t i = 0; i < gradients.size(); ++i) chain->parameters()[i].mutable_grad() = gradients[i].second;
    with.step();
    chain->zero_grad();
  };
  if (trained_before) {
    plain_step(plain, *plain_optimizer, 0);
    plain_step(model, *optimizer, 0);
  }
  for (auto& layer : model->layers) fully_shard(layer, {.mesh = rank.mesh()});
  fully_shard(model, {.mesh = rank.mesh()});
  rank.check_equal(adopt(*optimizer), 8, what + ": parameters moved");
  for (int step = 1; step < 4; ++step) {
    plain_step(plain, *plain_optimizer, step);
    Inputs inputs(rank.index(), step);
    optimizer->zero_grad();
    model->forward(inputs.normal({4, 5})).square().mean().backward();
    optimizer->step();
    auto full = unique_parameters(*plain), found = unique_parameters(*model);
    for (size_t i = 0; i < full.size(); ++i)
      rank.check_close(found[i].second.detach(), rows_of(full[i].second.detach(), rank.index(), 2),
                       fmt::format("{}, step {}: {}", what, step, full[i].first));
  }
  rank.check_equal(adopt(*optimizer), 0, what + ": a second adopt moves nothing");
}

TEST_CASE("adopt moves an optimizer over with its state, and training continues as the plain model's",
          "[runtime][adopt]") {
  using Tensors = std::vector<at::Tensor>;
  namespace optim = torch::optim;
  on_ranks(2, [](Rank& rank) {
    for (bool before : {false, true}) {
      adopted_optimizer_continues(
          rank, [](Tensors p) { return std::make_unique<optim::AdamW>(p, optim::AdamWOptions(0.02).eps(1e-2)); }, before,
          "AdamW");
      adopted_optimizer_continues(
          rank,
          [](Tensors p) { return std::make_unique<optim::AdamW>(p, optim::AdamWOptions(0.02).eps(1e-2).amsgrad(true)); },
          before, "AdamW amsgrad");
      adopted_optimizer_continues(
          rank, [](Tensors p) { return std::make_unique<optim::SGD>(p, optim::SGDOptions(0.1).momentum(0.9)); }, before,
          "SGD");
    }
  });
}

TEST_CASE("adopt keeps parameter groups and their options", "[runtime][adopt]") {
  on_ranks(2, [](Rank& rank) {
    auto model = plain_chain(1);
    namespace optim = torch::optim;
    std::vector<optim::OptimizerParamGroup> groups;
    groups.emplace_back(model->layers[0]->parameters(), std::make_unique<optim::SGDOptions>(0.5));
    groups.emplace_back(model->head->parameters(), std::make_unique<optim::SGDOptions>(0.0));
    optim::SGD sgd(groups, optim::SGDOptions(0.1));
    fully_shard(model, {.mesh = rank.mesh()});
    adopt(sgd);
    auto head = sharded(model->head->weight).detach().clone(), layer = sharded(model->layers[0]->weight).detach().clone();
    Inputs inputs(rank.index(), 0);
    model->forward(inputs.normal({2, 6})).square().sum().backward();
    sgd.step();
    rank.check_identical(sharded(model->head->weight).detach(), head, "learning rate 0");
    rank.check(!at::equal(sharded(model->layers[0]->weight).detach(), layer), "learning rate 0.5");
    for (auto& group : sgd.param_groups())
      for (auto& parameter : group.params())
        rank.check(sharded(parameter).is_same(parameter), "holds sharded parameters");
  });
}

TEST_CASE("an optimizer built after fully_shard has nothing to adopt", "[runtime][adopt]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    torch::optim::AdamW optimizer(chain.model->parameters());
    rank.check_equal(adopt(optimizer), 0, "moved");
  });
}

}  // namespace
}  // namespace fsdp::test
