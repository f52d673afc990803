#include <catch2/catch.hpp>

#include "support/models.hpp"

// What the end of a forward gathers for the backward that follows.

namespace fsdp::test {
namespace {

using Calls = std::vector<std::string>;

/// What the forward of one step gathers, and its backward.
std::pair<Calls, Calls> gathers_of_passes(Rank& rank, ShardedChain& chain, int step) {
  rank.log().clear();
  auto loss = chain.loss(rank.index(), step);
  auto forward = rank.subjects_of("all_gather");
  rank.log().clear();
  loss.backward();
  auto backward = rank.subjects_of("all_gather");
  chain.model->zero_grad();
  return {forward, backward};
}

TEST_CASE("the end of a forward gathers what its backward begins with, one group fewer than at other times",
          "[runtime][gathers_for_backward]") {
  on_ranks(2, [](Rank& rank) {
    const Calls all = {"layer0", "layer1", "layer2", "layer3", "layer4", "root"};
    for (const int distance : {1, 2, 3}) {
      ShardedChain chain(rank.mesh(), 5);
      chain.root[0].set_prefetch_distance(distance);
      for (int step = 0; step < 2; ++step) gathers_of_passes(rank, chain, step);
      auto [forward, backward] = gathers_of_passes(rank, chain, 2);
      auto expected = all;
      for (int ahead = 1; ahead < distance; ++ahead) expected.push_back(fmt::format("layer{}", 5 - ahead));
      rank.check_equal(forward, expected, fmt::format("distance {}, forward", distance));
      Calls rest;
      for (int layer = 5 - distance; layer >= 1; --layer) rest.push_back(fmt::format("layer{}", layer));
      rank.check_equal(backward, rest, fmt::format("distance {}, backward", distance));
      const torch::NoGradGuard no_grad;
      rank.log().clear();
      chain.loss(rank.index(), 3);
      rank.check_equal(rank.subjects_of("all_gather"), all, fmt::format("distance {}, evaluation", distance));
    }
  });
}

TEST_CASE("what a forward gathers for its backward stays until that begins, and goes if another forward comes first",
          "[runtime][gathers_for_backward]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain(5);
    ShardedChain chain(rank.mesh(), 5);
    chain.root[0].set_prefetch_distance(2);
    for (int step = 0; step < 2; ++step) gathers_of_passes(rank, chain, step);
    auto loss = chain.loss(rank.index(), 2);
    rank.log().clear();
    loss.backward();
    rank.check_equal(rank.subjects_of("all_gather"), Calls{"layer3", "layer2", "layer1"}, "not gathered again");
    check_gradients(rank, *chain.model, averaged_gradients(plain, 2, 2), "gradients");
    chain.model->zero_grad();
    // Two forwards: only the second one's backward runs. The first such step does not know that.
    for (int step = 3; step < 6; ++step) {
      rank.log().clear();
      chain.loss(rank.index(), step);
      const Calls once = {"layer0", "layer1", "layer2", "layer3", "layer4", "root"};
      auto expected = once;
      if (step == 3) expected.emplace_back("layer4");
      rank.check_equal(rank.subjects_of("all_gather"), expected, fmt::format("first forward of step {}", step));
      chain.loss(rank.index(), step).backward();
      check_gradients(rank, *chain.model, averaged_gradients(plain, 2, step), fmt::format("step {}", step));
      const auto peak = chain.root[0].report().last_step_peak_bytes;
      rank.check(peak <= int64_t{4 * 6 * 7 * 4}, fmt::format("{} bytes at most", peak));
      chain.model->zero_grad();
      for (const auto& layer : chain.layers) rank.check(!layer.is_unsharded(), "released");
    }
    chain.loss(rank.index(), 5).backward();  // one forward again
    chain.model->zero_grad();
    rank.check_equal(gathers_of_passes(rank, chain, 5).first.size(), size_t{7}, "layer4 for backward");
    // Written since: autograd says so, and what it would compute with is gathered again.
    loss = chain.loss(rank.index(), 5);
    {
      const torch::NoGradGuard no_grad;
      chain.model->layers[4]->parameters()[0].mul_(1);
    }
    rank.log().clear();
    rank.check_throws<std::exception>([&] { loss.backward(); }, {"modified by an inplace operation"}, "a write");
    const auto again = rank.subjects_of("all_gather");
    rank.check_equal(std::count(again.begin(), again.end(), "layer4"), ptrdiff_t{1}, "gathered again");
    chain.root[0].reset_iter_state();
    // A forward whose step is given up.
    chain.loss(rank.index(), 6);
    chain.root[0].reset_iter_state();
    for (const auto& layer : chain.layers) rank.check(!layer.is_unsharded(), "released");
    chain.loss(rank.index(), 7).backward();
    check_gradients(rank, *chain.model, averaged_gradients(plain, 2, 7), "after it");
  });
}

TEST_CASE("a byte budget and a list hold for the end of a forward, too", "[runtime][gathers_for_backward]") {
  on_ranks(2, [](Rank& rank) {
    const int64_t layer = 6 * 7 * 4;
    for (const int64_t layers : {2, 3, 4}) {
      ShardedChain chain(rank.mesh(), 6);
      chain.root[0].set_prefetch_distance(2);
      chain.root[0].set_unsharded_byte_budget(layers * layer);
      for (int step = 0; step < 4; ++step) chain.step(rank.index(), step);
      for (int step = 4; step < 6; ++step) {
        const auto peak = chain.root[0].report().last_step_peak_bytes;
        rank.check(peak <= layers * layer, fmt::format("{} of {} bytes", peak, layers * layer));
        chain.loss(rank.index(), step);  // two forwards
        chain.step(rank.index(), step);
      }
    }
    for (const bool is_listed : {false, true}) {
      ShardedChain chain(rank.mesh(), 5);
      chain.root[0].set_prefetch_distance(3);
      if (is_listed)
        chain.layers[4].set_modules_to_backward_prefetch({chain.layers[2]});
      else
        chain.layers[4].set_unshard_in_backward(false);
      for (int step = 0; step < 2; ++step) gathers_of_passes(rank, chain, step);
      // Behind a list the order says nothing; and what backward is not to gather ahead is gathered at its use.
      rank.check_equal(gathers_of_passes(rank, chain, 2).first.size(), size_t(is_listed ? 7 : 6), "for backward");
    }
  });
}

}  // namespace
}  // namespace fsdp::test
