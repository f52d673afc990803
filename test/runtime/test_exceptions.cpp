#include <catch2/catch.hpp>

#include "support/models.hpp"

// Exceptions in forward or backward, on all ranks (T16).

namespace fsdp::test {
namespace {

void trains_on(const Rank& rank, ShardedChain& chain, Chain& plain, const std::string& what) {
  for (int step = 0; step < 3; ++step) {
    chain.model->zero_grad();
    chain.loss(rank.index(), step).backward();
    check_gradients(rank, *chain.model, averaged_gradients(plain, rank.size(), step), fmt::format("{}, {}", what, step));
  }
  for (auto& layer : chain.layers) rank.check(!layer.is_unsharded(), what + ": nothing is left unsharded");
  chain.model->zero_grad();
}

/// reset_iter_state leaves neither gradients of the step nor unsharded groups.
void check_reset(const Rank& rank, ShardedChain& chain, const std::string& what) {
  chain.root[0].reset_iter_state();
  for (auto& module : chain.root[0].sharded_modules())
    rank.check(!module.is_unsharded(), what + ": everything is released");
}

TEST_CASE("after an exception in forward reset_iter_state restores use", "[runtime][exceptions]") {
  on_ranks(2, [](Rank& rank) {
    for (int at : {0, 1, 2}) {
      auto plain = plain_chain();
      ShardedChain chain(rank.mesh());
      chain.step(rank.index());
      chain.model->after_layer = [&](int layer) {
        if (layer == at) throw std::runtime_error("forward failed");
      };
      rank.check_throws<std::runtime_error>([&] { chain.loss(rank.index(), 0); }, {"forward failed"}, "forward");
      chain.model->after_layer = {};
      check_reset(rank, chain, "forward");
      trains_on(rank, chain, plain, fmt::format("after an exception in forward behind layer{}", at));
    }
  });
}

TEST_CASE("after an exception in backward reset_iter_state restores use, that step's gradients are gone",
          "[runtime][exceptions]") {
  on_ranks(2, [](Rank& rank) {
    for (int warm : {0, 1, 2}) {
      auto plain = plain_chain();
      ShardedChain chain(rank.mesh());
      for (int step = 0; step < warm; ++step) chain.step(rank.index(), step);
      bool fail = true;
      chain.model->layers[1]->weight.register_hook([&](at::Tensor) {
        if (fail) throw std::runtime_error("hook failed");
      });
      rank.check_throws<std::exception>([&] { chain.loss(rank.index(), 0).backward(); }, {"hook failed"}, "backward");
      fail = false;
      check_reset(rank, chain, "backward");
      trains_on(rank, chain, plain, fmt::format("after an exception in backward, {} steps before", warm));
    }
  });
}

TEST_CASE("an exception in the first backward of an accumulation drops what was accumulated",
          "[runtime][exceptions]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    chain.root[0].set_requires_gradient_sync(false);
    bool fail = true;
    chain.model->layers[0]->weight.register_hook([&](at::Tensor) {
      if (fail) throw std::runtime_error("hook failed");
    });
    rank.check_throws<std::exception>([&] { chain.loss(rank.index(), 0).backward(); }, {"hook failed"}, "backward");
    fail = false;
    check_reset(rank, chain, "accumulation");
    chain.root[0].set_requires_gradient_sync(true);
    trains_on(rank, chain, plain, "after an exception while accumulating");
  });
}

TEST_CASE("reset_iter_state at rest changes nothing and communicates nothing", "[runtime][exceptions]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    chain.root[0].reset_iter_state();
    chain.loss(rank.index(), 0).backward();
    rank.log().clear();
    chain.root[0].reset_iter_state();
    rank.check(rank.log().calls.empty(), "no communication");
    trains_on(rank, chain, plain, "after a reset at rest");
  });
}

TEST_CASE("a rank that fails makes the others fail by name instead of hanging", "[runtime][exceptions]") {
  std::vector<std::string> messages(3);
  auto body = [&](std::shared_ptr<Communicator> world) {
    ShardedChain chain(init_device_mesh(world, {3}, {"shard"}));
    int rank = world->rank();
    if (rank == 1)
      chain.model->after_layer = [](int layer) {
        if (layer == 1) throw std::runtime_error("rank 1 failed");
      };
    try {
      chain.step(rank);
    } catch (const std::exception& error) {
      messages[rank] = error.what();
      throw;
    }
  };
  CHECK_THROWS_WITH(run_ranks(3, body), Catch::Contains("rank 1 failed"));
  for (int rank : {0, 2}) {
    INFO(messages[rank]);
    CHECK_THAT(messages[rank], Catch::Contains("all_gather") && Catch::Contains("layer2"));
  }
}

}  // namespace
}  // namespace fsdp::test
