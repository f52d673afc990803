#include <catch2/catch.hpp>

#include <thread>

#include "support/models.hpp"

// Gradient accumulation and synchronisation.

namespace fsdp::test {
namespace {

using Calls = std::vector<std::string>;

MakeWorkload accumulating_chain() {
  return [] { return chain_workload(); };
}

TEST_CASE("micro-batches sum to the same gradients in every form", "[runtime][accumulation]") {
  for (auto form : {Accumulation::kReduceEach, Accumulation::kSyncAtLast, Accumulation::kLastBackward})
    for (int world_size : {2, 3})
      trains_like_plain(accumulating_chain(), {.world_size = world_size, .micro_batches = 3, .accumulation = form});
  for (auto form : {Accumulation::kReduceEach, Accumulation::kSyncAtLast, Accumulation::kAllReduceLast})
    trains_like_plain(accumulating_chain(), {.world_size = 4, .replicas = 2, .micro_batches = 3, .accumulation = form});
}

TEST_CASE("accumulation works with groups that are kept, and with a module used twice", "[runtime][accumulation]") {
  for (auto form : {Accumulation::kReduceEach, Accumulation::kSyncAtLast})
    trains_like_plain(accumulating_chain(), {.micro_batches = 2, .accumulation = form, .reshard_after_forward = false});
}

TEST_CASE("without synchronisation nothing is reduced and no sharded gradient appears", "[runtime][accumulation]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    chain.root[0].set_requires_gradient_sync(false);
    chain.loss(rank.index(), 0).backward();
    rank.check(rank.subjects_of("reduce_scatter").empty(), "nothing reduced");
    for (auto& parameter : chain.model->parameters()) rank.check(!parameter.grad().defined(), "no gradient yet");
    chain.root[0].set_requires_gradient_sync(true);
    rank.log().clear();
    chain.loss(rank.index(), 1).backward();
    rank.check_equal(rank.subjects_of("reduce_scatter").size(), size_t{4}, "one reduction a group");
    check_gradients(rank, *chain.model, summed_gradients(plain, 2, {0, 1}), "the sum of both");
  });
}

TEST_CASE("synchronisation can be turned off for one module alone", "[runtime][accumulation]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    chain.layers[1].set_requires_gradient_sync(false);
    chain.loss(rank.index(), 0).backward();
    rank.check_equal(rank.subjects_of("reduce_scatter").size(), size_t{3}, "the others are reduced");
    rank.check(!chain.model->layers[1]->parameters()[0].grad().defined(), "this one is not");
    chain.root[0].set_requires_gradient_sync(false, Recurse::kNo);
    chain.layers[1].set_requires_gradient_sync(true);
    rank.log().clear();
    chain.loss(rank.index(), 0).backward();
    rank.check_equal(rank.subjects_of("reduce_scatter").size(), size_t{3}, "the root alone is held back");
    chain.root[0].set_requires_gradient_sync(true);
    chain.loss(rank.index(), 0).backward();
    auto three = averaged_gradients(plain, 2, 0);
    check_gradients(rank, *chain.model, three, "three backwards of the same batch", 3);
  });
}

TEST_CASE("HSDP without all-reduce adds up partial sums and reduces them once", "[runtime][accumulation]") {
  on_ranks(4, [](Rank& rank) {
    auto mesh = rank.hybrid(2, 2);
    ShardedChain chain(mesh);
    rank.log().clear();
    chain.root[0].set_requires_all_reduce(false);
    chain.loss(rank.index(), 0).backward();
    rank.check_equal(rank.subjects_of("reduce_scatter").size(), size_t{4}, "reduced within the shard group");
    rank.check(rank.subjects_of("all_reduce").empty(), "not across replicas");
    chain.root[0].set_requires_all_reduce(true);
    rank.log().clear();
    chain.loss(rank.index(), 1).backward();
    rank.check_equal(rank.subjects_of("all_reduce").size(), size_t{4}, "one all-reduce a group");
  });
}

TEST_CASE("a frozen step in between loses nothing: gradients held back survive an eval pass", "[runtime][accumulation]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    chain.root[0].set_requires_gradient_sync(false);
    chain.loss(rank.index(), 0).backward();
    {
      at::NoGradGuard no_grad;
      chain.loss(rank.index(), 5);
    }
    chain.root[0].set_requires_gradient_sync(true);
    chain.loss(rank.index(), 0).backward();
    check_gradients(rank, *chain.model, averaged_gradients(plain, 2, 0), "twice the same batch", 2);
  });
}

/// The last micro-batch's loss leads to no parameter: its forward uses none, or what it gives is detached.
MakeWorkload chain_left_out_at_last(bool is_used) {
  return [is_used] {
    Chain chain(3, 6);
    return Workload{.module = chain.ptr(),
                    .shard = shard_each({chain->layers[0].ptr(), chain.ptr()}),
                    .loss = [chain, is_used](Inputs& in) mutable {
                      auto x = in.normal({4, 6}).requires_grad_();
                      if (in.micro_batch == 0) return chain->forward(x).square().mean();
                      return is_used ? x.square().mean() + chain->forward(x).detach().mean() : x.square().mean();
                    }};
  };
}

TEST_CASE("a last backward that reaches no parameter reduces what the others have left", "[runtime][accumulation]") {
  for (const bool is_used : {false, true}) {
    INFO((is_used ? "used, and detached" : "not used"));
    for (const auto form : {Accumulation::kSyncAtLast, Accumulation::kLastBackward, Accumulation::kReduceEach})
      for (const auto reshard : {ReshardAfterForward(true), ReshardAfterForward(false)})
        trains_like_plain(chain_left_out_at_last(is_used),
                          {.micro_batches = 2, .accumulation = form, .reshard_after_forward = reshard});
    for (const auto form : {Accumulation::kSyncAtLast, Accumulation::kAllReduceLast})
      trains_like_plain(chain_left_out_at_last(is_used),
                        {.world_size = 4, .replicas = 2, .micro_batches = 2, .accumulation = form});
  }
}

TEST_CASE("another model's backward in an accumulation loses and adds nothing", "[runtime][accumulation]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh()), other(rank.mesh());
    chain.root[0].set_requires_gradient_sync(false);
    chain.loss(rank.index(), 0).backward();
    rank.log().clear();
    other.loss(rank.index(), 5).backward();
    rank.check_equal(rank.subjects_of("reduce_scatter").size(), size_t{4}, "while nothing is to be reduced: its own alone");
    chain.root[0].set_requires_gradient_sync(true);
    auto loss = chain.loss(rank.index(), 1);
    other.loss(rank.index(), 5).backward();
    loss.backward();
    check_gradients(rank, *chain.model, summed_gradients(plain, 2, {0, 1}), "the sum of both");
  });
}

TEST_CASE("what is left on one thread is no business of another one's backward", "[runtime][accumulation]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    chain.root[0].set_requires_gradient_sync(false);
    chain.loss(rank.index(), 0).backward();
    chain.root[0].set_requires_gradient_sync(true);
    rank.log().clear();
    std::thread([] { torch::ones({2}, at::requires_grad()).sum().backward(); }).join();
    rank.check(rank.subjects_of("reduce_scatter").empty(), "nothing reduced");
    torch::ones({2}, at::requires_grad()).sum().backward();
    rank.check_equal(rank.subjects_of("reduce_scatter").size(), size_t{4}, "all of it");
  });
}

}  // namespace
}  // namespace fsdp::test
