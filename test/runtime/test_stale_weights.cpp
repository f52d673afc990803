#include <catch2/catch.hpp>

#include "support/models.hpp"

// A write between forward and backward raises LibTorch's own error, as in the plain model.

namespace fsdp::test {
namespace {

TEST_CASE("an optimizer step between forward and backward raises LibTorch's version error", "[runtime][stale_weights]") {
  // Of one row each, the second rank has none.
  const int64_t width = GENERATE(6, 1);
  on_ranks(2, [width](Rank& rank) {
    auto plain = plain_chain(3, width);
    ShardedChain chain(rank.mesh(), 3, width);
    // LibTorch's SGD writes through data(), which hides from autograd in the plain model too; AdamW does not.
    torch::optim::AdamW adam(chain.model->parameters()), plain_adam(plain->parameters());
    averaged_gradients(plain, 2);
    chain.loss(rank.index(), 0).backward();
    Inputs inputs(rank.index(), 0);
    auto plain_loss = plain->forward(inputs.normal({4, width})).sum();
    auto loss = chain.loss(rank.index(), 0);
    plain_adam.step();
    adam.step();
    std::vector<std::string> libtorch_says{"modified by an inplace operation"};
    rank.check_throws<c10::Error>([&] { plain_loss.backward(); }, libtorch_says, "plain");
    rank.check_throws<c10::Error>([&] { loss.backward(); }, libtorch_says, "sharded");
    chain.root[0].reset_iter_state();
    chain.model->zero_grad();
    chain.loss(rank.index(), 1).backward();
    for (auto& parameter : chain.model->parameters()) rank.check(parameter.grad().defined(), "goes on after a reset");
  });
}

TEST_CASE("a write to an unsharded parameter between forward and backward raises it too", "[runtime][stale_weights]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    auto loss = chain.loss(rank.index(), 0);
    {
      at::NoGradGuard no_grad;
      chain.model->layers[1]->weight.mul_(2);
    }
    rank.check_throws<c10::Error>([&] { loss.backward(); }, {"modified by an inplace operation"}, "sharded");
  });
}

TEST_CASE("releasing and gathering again is no modification", "[runtime][stale_weights]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    auto version = chain.model->layers[0]->weight._version();
    for (int step = 0; step < 3; ++step) {
      auto loss = chain.loss(rank.index(), step);
      for (auto& module : chain.layers) {
        module.unshard();
        module.reshard();
      }
      loss.backward();
    }
    rank.check_equal(chain.model->layers[0]->weight._version(), version, "the unsharded parameter's version");
  });
}

}  // namespace
}  // namespace fsdp::test
