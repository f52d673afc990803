#include <catch2/catch.hpp>

#include "support/models.hpp"

// Exceptions in forward or backward, on all ranks.

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
namespace {

/// A user's communicator whose next `wait` fails when it is told so, and that goes on to work.
class FailsOnce final : public Communicator {
 public:
  FailsOnce(std::shared_ptr<Communicator> inner, std::shared_ptr<bool> fails)
      : Communicator(inner->rank(), inner->ranks(), inner->name()), inner_(std::move(inner)), fails_(std::move(fails)) {}
  std::string backend() const override { return inner_->backend(); }
  std::shared_ptr<Work> start_all_gather(const at::Tensor& output, const at::Tensor& input, std::string_view subject) override {
    return wrap(inner_->start_all_gather(output, input, subject));
  }
  std::shared_ptr<Work> start_reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                                             std::string_view subject) override {
    return wrap(inner_->start_reduce_scatter(output, input, op, subject));
  }
  std::shared_ptr<Work> start_all_reduce(const at::Tensor& tensor, ReduceOp op, std::string_view subject) override {
    return wrap(inner_->start_all_reduce(tensor, op, subject));
  }
  std::shared_ptr<Work> start_broadcast(const at::Tensor& tensor, int root, std::string_view subject) override {
    return wrap(inner_->start_broadcast(tensor, root, subject));
  }
  std::shared_ptr<Communicator> split(std::span<const int> ranks, const std::string& name) override {
    auto group = inner_->split(ranks, name);
    return group ? std::make_shared<FailsOnce>(std::move(group), fails_) : nullptr;
  }
  void abort(const std::string& reason) override { inner_->abort(reason); }

 private:
  struct Wrapped final : Work {
    Wrapped(std::shared_ptr<Work> inner, std::shared_ptr<bool> fails) : inner(std::move(inner)), fails(std::move(fails)) {}
    void wait() override {
      inner->wait();
      if (std::exchange(*fails, false)) throw CommError("the cable was out");
    }
    bool is_completed() override { return inner->is_completed(); }
    std::shared_ptr<Work> inner;
    std::shared_ptr<bool> fails;
  };
  std::shared_ptr<Work> wrap(std::shared_ptr<Work> work) const { return std::make_shared<Wrapped>(std::move(work), fails_); }

  std::shared_ptr<Communicator> inner_;
  std::shared_ptr<bool> fails_;
};

}  // namespace

TEST_CASE("behind a gather whose wait has failed the next one sends what the parameters hold by then",
          "[runtime][exceptions]") {
  const auto dtype = GENERATE(at::kFloat, at::kBFloat16);  // cast in front of each gather, or sent as they lie
  CAPTURE(dtype);
  const bool ok = on_ranks(2, [&](Rank& rank) {
    const auto fails = std::make_shared<bool>(false);
    const auto world = std::make_shared<FailsOnce>(rank.world(), fails);
    torch::NoGradGuard no_grad;
    nn::Linear net(4, 4);
    net->weight.fill_(1);
    net->bias.zero_();
    fully_shard(net, {.mesh = init_device_mesh(world, {2}, {"shard"}), .mp_policy = {.param_dtype = dtype}});
    *fails = true;
    rank.check_throws<CommError>([&] { net->forward(torch::ones({1, 4})); }, {"the cable was out"}, "one wait");
    for (auto& parameter : net->parameters()) parameter.mul_(3);
    rank.check_close(net->forward(torch::ones({1, 4})).to(at::kFloat), torch::full({1, 4}, 12.0F), "the values by then");
  });
  CHECK(ok);
}

}  // namespace fsdp::test
