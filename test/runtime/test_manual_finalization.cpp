#include <catch2/catch.hpp>

#include "support/models.hpp"

// Backwards that the caller finalizes (set_manual_backward_finalization, finalize_backward).

namespace fsdp::test {
namespace {

struct ManualChain : ShardedChain {
  explicit ManualChain(const DeviceMesh& mesh) : ShardedChain(mesh) {
    root[0].set_manual_backward_finalization(true);
  }
};

void check_no_gradients(const Rank& rank, const ManualChain& chain, const std::string& what) {
  for (const auto& parameter : chain.model->parameters())
    rank.check(!parameter.grad().defined(), what + ": no gradient yet");
}

bool is_finalized_like_plain(const Rank& rank, ManualChain& chain, Chain& plain, int step, const std::string& what) {
  for (auto& layer : chain.layers)
    if (rank.size() > 1) rank.check(!layer.is_unsharded(), what + ": released");
  check_gradients(rank, *chain.model, averaged_gradients(plain, rank.size(), step), what);
  return true;
}

TEST_CASE("after finalize_backward gradients equal plain", "[runtime][manual_finalization]") {
  for (int world_size : {1, 2, 3, 4})
    CHECK(on_ranks(world_size, [](Rank& rank) {
      for (bool async : {false, true}) {
        auto plain = plain_chain();
        ManualChain chain(rank.mesh());
        for (int step = 0; step < 4; ++step) {
          chain.model->zero_grad();
          chain.loss(rank.index(), step).backward();
          if (async) {
            auto handle = chain.root[0].finalize_backward_async();
            handle.wait();
            handle.wait();
          } else {
            chain.root[0].finalize_backward();
          }
          is_finalized_like_plain(rank, chain, plain, step, fmt::format("step {}, async {}", step, async));
        }
      }
    }));
}

/// As one that finds no memory, the first time.
struct NoRoomOnce final : ReduceScatterComm {
  std::shared_ptr<Work> start_reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                             Communicator& group, std::string_view subject) override {
    if (std::exchange(fails, false)) throw std::runtime_error("no room");
    return ReduceScatterComm::start_reduce_scatter(output, input, op, group, subject);
  }
  bool fails = true;
};

TEST_CASE("a reduction that fails to start is gone, and the next finalization reduces the others",
          "[runtime][manual_finalization]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ManualChain chain(rank.mesh());
    chain.root[0].set_reduce_scatter_unused_params(true);  // all at the end
    chain.layers[0].set_custom_reduce_scatter(std::make_shared<NoRoomOnce>());
    chain.loss(rank.index(), 0).backward();
    rank.check_throws<std::runtime_error>([&] { chain.root[0].finalize_backward(); }, {"no room"}, "the first");
    chain.root[0].finalize_backward();
    rank.check(!chain.model->layers[0]->weight.grad().defined(), "what failed has no gradient");
    for (size_t i = 1; i < chain.layers.size(); ++i)
      rank.check(chain.model->layers[i]->weight.grad().defined(), "the others are reduced");
    chain.model->zero_grad();
    chain.loss(rank.index(), 1).backward();
    chain.root[0].finalize_backward();
    is_finalized_like_plain(rank, chain, plain, 1, "the next step");
  });
}

TEST_CASE("HSDP and replicate-only finalize too", "[runtime][manual_finalization]") {
  on_ranks(4, [](Rank& rank) {
    for (bool replicate_only : {false, true}) {
      auto plain = plain_chain(), model = plain_chain();
      const auto mesh = replicate_only ? rank.mesh() : rank.hybrid(2, 2);
      for (auto& layer : model->layers) fully_shard(layer, {.mesh = mesh, .replicate_only = replicate_only});
      auto root = fully_shard(model, {.mesh = mesh, .replicate_only = replicate_only});
      root.set_manual_backward_finalization(true);
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        Inputs inputs(rank.index(), step);
        model->forward(inputs.normal({4, 6})).square().mean().backward();
        auto handle = root.finalize_backward_async();
        handle.wait();
        const auto expected = averaged_gradients(plain, 4, step), found = unique_parameters(*model);
        for (size_t i = 0; i < found.size(); ++i)
          rank.check_close(grad_dtensor_of(found[i].second).full_tensor(), expected[i].second, found[i].first);
      }
    }
  });
}

TEST_CASE("the end of a backward starts what is complete and waits for nothing", "[runtime][manual_finalization]") {
  on_ranks(2, [](Rank& rank) {
    ManualChain chain(rank.mesh());
    chain.model->skipped = {1};
    rank.log().clear();
    chain.loss(rank.index(), 0).backward();
    rank.check_equal(rank.subjects_of("reduce_scatter").size(), size_t{3}, "complete groups are reduced");
    rank.check(!chain.model->layers[0]->parameters()[0].grad().defined(), "the last one has not been waited for");
    const auto steps = statistics(chain.root[0]).reductions;
    chain.root[0].finalize_backward();
    rank.check_equal(statistics(chain.root[0]).reductions, steps, "nothing was left");
    rank.check(chain.model->layers[0]->parameters()[0].grad().defined(), "there now");
    rank.check(!chain.model->layers[1]->parameters()[0].grad().defined(), "not used");
  });
}

TEST_CASE("what a backward left incomplete is reduced by finalize_backward", "[runtime][manual_finalization]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ManualChain chain(rank.mesh());
    chain.root[0].set_reduce_scatter_unused_params(true);  // nothing counts as complete
    for (int step = 0; step < 2; ++step) {
      chain.model->zero_grad();
      rank.log().clear();
      chain.loss(rank.index(), step).backward();
      rank.check_equal(rank.subjects_of("reduce_scatter").size(), size_t{0}, "nothing yet");
      check_no_gradients(rank, chain, "before");
      chain.root[0].finalize_backward();
      rank.check_equal(rank.subjects_of("reduce_scatter").size(), size_t{4}, "each group once");
      is_finalized_like_plain(rank, chain, plain, step, "unused parameters");
    }
  });
}

TEST_CASE("several backwards without synchronisation, then one finalization", "[runtime][manual_finalization]") {
  for (int world_size : {1, 2, 3})
    CHECK(on_ranks(world_size, [](Rank& rank) {
      auto plain = plain_chain();
      ManualChain chain(rank.mesh());
      for (int round = 0; round < 2; ++round) {
        chain.model->zero_grad();
        chain.root[0].set_requires_gradient_sync(false);
        rank.log().clear();
        for (int step = 0; step < 3; ++step) chain.loss(rank.index(), step).backward();
        rank.check_equal(rank.subjects_of("reduce_scatter").size(), size_t{0}, "nothing is reduced");
        chain.root[0].set_requires_gradient_sync(true);
        chain.root[0].finalize_backward();
        check_gradients(rank, *chain.model, summed_gradients(plain, rank.size(), {0, 1, 2}), "the sum of three");
      }
    }));
}

TEST_CASE("several synchronised backwards add up", "[runtime][manual_finalization]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ManualChain chain(rank.mesh());
    for (int step : {0, 1}) chain.loss(rank.index(), step).backward();
    chain.root[0].finalize_backward();
    check_gradients(rank, *chain.model, summed_gradients(plain, 2, {0, 1}), "the sum of two");
  });
}

TEST_CASE("before a handle is waited for the root does no other work", "[runtime][manual_finalization]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ManualChain chain(rank.mesh());
    chain.loss(rank.index(), 0).backward();
    auto handle = chain.root[0].finalize_backward_async();
    rank.check_throws<StateError>([&] { chain.loss(rank.index(), 1); }, {"finalize_backward_async", "wait()"}, "forward");
    rank.check_throws<StateError>([&] { chain.root[0].finalize_backward(); }, {"wait()"}, "a second time");
    rank.check_throws<StateError>([&] { chain.root[0].set_manual_backward_finalization(false); }, {"finalized"}, "mode");
    handle.wait();
    is_finalized_like_plain(rank, chain, plain, 0, "afterwards");
    chain.root[0].set_manual_backward_finalization(false);
    chain.model->zero_grad();
    chain.loss(rank.index(), 1).backward();
    is_finalized_like_plain(rank, chain, plain, 1, "by itself again");
  });
}

TEST_CASE("reset_iter_state drops what a handle was to wait for", "[runtime][manual_finalization]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ManualChain chain(rank.mesh());
    chain.loss(rank.index(), 0).backward();
    auto handle = chain.root[0].finalize_backward_async();
    chain.root[0].reset_iter_state();
    rank.check_throws<StateError>([&] { handle.wait(); }, {"reset_iter_state", "GradientReductionHandle"}, "dropped");
    check_no_gradients(rank, chain, "dropped");
    chain.loss(rank.index(), 1).backward();
    chain.root[0].finalize_backward();
    is_finalized_like_plain(rank, chain, plain, 1, "the next step");
  });
}

TEST_CASE("finalize_backward at the wrong time is an error, without a backward it does nothing",
          "[runtime][manual_finalization]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain automatic(rank.mesh());
    rank.check_throws<StateError>([&] { automatic.root[0].finalize_backward(); },
                                  {"set_manual_backward_finalization"}, "automatic");
    ManualChain chain(rank.mesh());
    rank.log().clear();
    chain.root[0].finalize_backward();
    chain.root[0].finalize_backward_async().wait();
    rank.check(rank.log().calls.empty(), "nothing to do");
    rank.check_throws<StateError>([&] { chain.layers[0].finalize_backward(); }, {"root"}, "not a root");
    rank.check_throws<StateError>([&] { chain.layers[0].set_manual_backward_finalization(true); }, {"root"}, "not a root");
    auto loss = chain.loss(rank.index(), 0);
    rank.check_throws<StateError>([&] { chain.root[0].finalize_backward(); }, {"between a forward"}, "after forward");
    bool was_refused = false;
    [[maybe_unused]] const auto hook = chain.model->head->weight.register_hook([&](const at::Tensor& gradient) {
      try {
        chain.root[0].finalize_backward();
      } catch (const StateError&) {
        was_refused = true;
      }
      return gradient;
    });
    loss.backward();
    rank.check(was_refused, "inside a backward");
    rank.check_throws<StateError>([&] { chain.root[0].set_manual_backward_finalization(false); }, {"not finalized"}, "mode");
    chain.root[0].finalize_backward();
    rank.check(chain.model->head->weight.defined(), "still there");
    // A backward through none of the parameters.
    auto leaf = torch::ones({2}, torch::requires_grad());
    leaf.sum().backward();
    chain.root[0].finalize_backward();
  });
}

}  // namespace
}  // namespace fsdp::test
