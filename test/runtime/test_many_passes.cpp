#include <catch2/catch.hpp>

#include "support/models.hpp"

// Forwards and backwards in every combination.

namespace fsdp::test {
namespace {

using at::Tensor;

TEST_CASE("two forwards before one backward", "[runtime][many_passes]") {
  trains_like_plain([] {
    auto workload = chain_workload();
    auto loss = workload.loss;
    workload.loss = [loss](Inputs& in) { return loss(in) + loss(in) * 2; };
    return workload;
  });
}

/// Runs `passes` on the plain model for each rank's inputs and on the sharded one; gradients agree.
void passes_like_plain(std::function<void(Chain&, Inputs&)> passes, ReshardAfterForward reshard = {}) {
  auto plain = plain_chain();
  for (int rank = 0; rank < 2; ++rank) {
    Inputs inputs(rank, 0);
    passes(plain, inputs);
  }
  NamedTensors expected;
  for (auto& [name, parameter] : unique_parameters(*plain)) expected.emplace_back(name, parameter.grad() / 2);
  on_ranks(2, [&](Rank& rank) {
    ShardedChain chain(rank.mesh(), 3, 6, reshard);
    for (int step = 0; step < 3; ++step) {
      chain.model->zero_grad();
      Inputs inputs(rank.index(), 0);
      passes(chain.model, inputs);
      check_gradients(rank, *chain.model, expected, fmt::format("step {}", step));
    }
    for (auto& layer : chain.layers) rank.check(!layer.is_unsharded(), "nothing is left unsharded");
  });
}

TEST_CASE("two forwards, then their backwards in either order", "[runtime][many_passes]") {
  for (ReshardAfterForward reshard : {ReshardAfterForward(), ReshardAfterForward(false)}) {
    passes_like_plain(
        [](Chain& model, Inputs& in) {
          auto first = model->forward(in.normal({4, 6})).square().mean();
          auto second = model->forward(in.normal({4, 6})).square().mean();
          first.backward();
          second.backward();
        },
        reshard);
    passes_like_plain(
        [](Chain& model, Inputs& in) {
          auto first = model->forward(in.normal({4, 6})).square().mean();
          auto second = model->forward(in.normal({4, 6})).square().mean();
          second.backward();
          first.backward();
        },
        reshard);
  }
}

TEST_CASE("several backwards through one graph with retain_graph", "[runtime][many_passes]") {
  for (ReshardAfterForward reshard : {ReshardAfterForward(), ReshardAfterForward(false)})
    passes_like_plain(
        [](Chain& model, Inputs& in) {
          auto loss = model->forward(in.normal({4, 6})).square().mean();
          loss.backward({}, /*retain_graph=*/true);
          loss.backward({}, /*retain_graph=*/true);
          loss.backward();
        },
        reshard);
}

TEST_CASE("a loss computed in chunks", "[runtime][many_passes]") {
  passes_like_plain([](Chain& model, Inputs& in) {
    auto x = torch::tanh(model->layers[0]->forward(in.normal({6, 6})));
    auto detached = x.detach().requires_grad_();
    for (auto& chunk : detached.chunk(3)) model->head->forward(chunk).square().sum().backward();
    x.backward(detached.grad());
    torch::cat({model->layers[1]->weight, model->layers[2]->weight}).sum().backward();
    (model->layers[1]->bias.sum() + model->layers[2]->bias.sum()).backward();
  });
}

TEST_CASE("a graph that is never run backward costs the next step nothing", "[runtime][many_passes]") {
  passes_like_plain([](Chain& model, Inputs& in) {
    auto x = in.normal({4, 6});
    model->forward(x).sum();
    auto kept = model->forward(x).sum();
    model->forward(x).square().mean().backward();
  });
}

TEST_CASE("a no_grad pass, an eval pass and inference mode between training steps", "[runtime][many_passes]") {
  passes_like_plain([](Chain& model, Inputs& in) {
    auto x = in.normal({4, 6});
    {
      at::NoGradGuard no_grad;
      model->forward(x);
    }
    {
      c10::InferenceMode inference;
      model->forward(x);
    }
    model->eval();
    {
      at::NoGradGuard no_grad;
      model->forward(x);
    }
    model->train();
    model->forward(x).square().mean().backward();
  });
}

TEST_CASE("a part of the model run by itself", "[runtime][many_passes]") {
  passes_like_plain([](Chain& model, Inputs& in) {
    auto x = in.normal({4, 6});
    for (auto layer : {model->layers[0], model->layers[2]}) layer->forward(x).square().mean().backward();
    model->layers[1]->forward(x).square().mean().backward();
    model->head->forward(x).square().mean().backward();
  });
}

TEST_CASE("eval without grad equals plain, by forward, by fsdp::call and in a scope", "[runtime][many_passes]") {
  on_ranks(3, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    Inputs inputs(rank.index(), 0);
    auto x = inputs.normal({4, 6});
    at::NoGradGuard no_grad;
    plain->eval();
    chain.model->eval();
    auto expected = plain->forward(x);
    for (int pass = 0; pass < 3; ++pass) {
      rank.check_close(chain.model->forward(x), expected, "forward");
      rank.check_close(fsdp::call(chain.model, x), expected, "call");
      rank.check(!chain.root[0].is_unsharded(), "the scope released the root");
      for (auto& layer : chain.layers) rank.check(!layer.is_unsharded(), "the scope released the layers");
      auto scope = forward_scope(chain.root[0]);
      rank.check_close(chain.model->forward(x), expected, "scope");
    }
    rank.check(rank.subjects_of("reduce_scatter").empty(), "nothing to reduce");
  });
}

TEST_CASE("a scope in eval prefetches along its order", "[runtime][many_passes]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    Inputs inputs(rank.index(), 0);
    auto x = inputs.normal({4, 6});
    at::NoGradGuard no_grad;
    std::vector<size_t> gathers;
    for (int pass = 0; pass < 3; ++pass) {
      gathers.clear();
      rank.log().clear();
      chain.model->after_layer = [&](int) { gathers.push_back(rank.log().calls.size()); };
      fsdp::call(chain.model, x);
      rank.check_equal(rank.log().calls.size(), size_t{4}, "one gather a group");
    }
    rank.check_equal(gathers, std::vector<size_t>{2, 3, 4}, "one ahead");
  });
}

TEST_CASE("training inside a scope equals training without", "[runtime][many_passes]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    for (int step = 0; step < 3; ++step) {
      Inputs inputs(rank.index(), step);
      fsdp::call(chain.model, inputs.normal({4, 6})).square().mean().backward();
      check_gradients(rank, *chain.model, averaged_gradients(plain, 2, step), fmt::format("step {}", step));
      chain.model->zero_grad();
      for (auto& layer : chain.layers) rank.check(!layer.is_unsharded(), "released");
    }
  });
}

TEST_CASE("fsdp::call on a plain module is its forward", "[runtime][many_passes]") {
  torch::nn::Linear plain(2, 2);
  auto x = torch::ones({1, 2});
  CHECK(at::equal(fsdp::call(plain, x), plain->forward(x)));
}

TEST_CASE("autograd::grad to what members hold gives the ranks' mean, as a DTensor", "[runtime][many_passes]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    for (int step = 0; step < 2; ++step) {
      const auto expected = averaged_gradients(plain, 2, step);
      auto found = torch::autograd::grad({chain.loss(rank.index(), step)},
                                         {chain.model->layers[1]->weight, chain.model->layers[2]->bias});
      for (const auto& gradient : found) rank.check(is_dtensor(gradient), "a DTensor");
      rank.check_close(full_tensor(found[0]), expected[2].second, "weight of layer1");
      rank.check_close(full_tensor(found[1]), expected[5].second, "bias of layer2");
      for (auto& parameter : chain.model->parameters()) rank.check(!parameter.grad().defined(), "no .grad appears");
    }
    chain.loss(rank.index(), 0).backward();
    check_gradients(rank, *chain.model, averaged_gradients(plain, 2, 0), "training afterwards");
  });
}

TEST_CASE("autograd::grad and backward over parameters() give the ranks' mean, and training goes on",
          "[runtime][many_passes]") {
  for (int world_size : {1, 2})
    on_ranks(world_size, [](Rank& rank) {
      auto plain = plain_chain();
      ShardedChain chain(rank.mesh());
      for (int step = 0; step < 2; ++step) {
        auto loss = chain.loss(rank.index(), 0);
        const auto registered = chain.model->parameters();
        registered[0].register_hook([](const at::Tensor& gradient) { return gradient; });  // may be
        const auto expected = averaged_gradients(plain, rank.size(), 0);
        for (const bool allow_unused : {false, true}) {
          const auto found = torch::autograd::grad({loss}, registered, {}, /*retain_graph=*/true, /*create_graph=*/false,
                                                   allow_unused);
          for (size_t i = 0; i < found.size(); ++i) {
            rank.check(is_dtensor(found[i]), "a DTensor");
            rank.check_close(full_tensor(found[i]), expected[i].second, "autograd::grad: " + expected[i].first);
            rank.check(!registered[i].grad().defined(), "no .grad appears");
          }
        }
        loss.backward({}, /*retain_graph=*/true, /*create_graph=*/false, registered);
        check_gradients(rank, *chain.model, expected, "backward with inputs");
        loss.backward();
        check_gradients(rank, *chain.model, expected, "added to afterwards", 2);
        chain.model->zero_grad();
      }
    });
}

TEST_CASE("a gradient penalty through the inputs with create_graph is right", "[runtime][many_passes]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    auto penalty = [](Chain& model, Inputs in) {
      auto x = in.normal({4, 6}).requires_grad_();
      auto y = model->forward(x).square().mean();
      auto slope = torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
      return y + slope.square().sum();
    };
    for (int r = 0; r < 2; ++r) penalty(plain, Inputs(r, 0)).backward();
    NamedTensors expected;
    for (auto& [name, parameter] : unique_parameters(*plain)) expected.emplace_back(name, parameter.grad() / 2);
    for (int step = 0; step < 2; ++step) {
      chain.model->zero_grad();
      penalty(chain.model, Inputs(rank.index(), 0)).backward();
      check_gradients(rank, *chain.model, expected, fmt::format("penalty, step {}", step));
    }
  });
}

TEST_CASE("backward with create_graph is refused by name, and training goes on after a reset",
          "[runtime][many_passes]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    rank.check_throws<StateError>(
        [&] { chain.loss(rank.index(), 0).backward({}, /*retain_graph=*/true, /*create_graph=*/true); },
        {"head.", "create_graph", "torch::autograd::grad"}, "create_graph");
    chain.root[0].reset_iter_state();
    chain.loss(rank.index(), 1).backward();
    check_gradients(rank, *chain.model, averaged_gradients(plain, 2, 1), "the next step");
  });
}

TEST_CASE("backward to chosen unsharded parameters reduces those", "[runtime][many_passes]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    auto expected = averaged_gradients(plain, 2);
    for (int step = 0; step < 2; ++step) {
      auto loss = chain.loss(rank.index(), 0);
      torch::autograd::backward({loss}, {}, {}, false, {chain.model->layers[1]->weight});
      rank.check_close(sharded(chain.model->layers[1]->weight).grad(), rows_of(expected[2].second, rank.index(), 2),
                       "the chosen one");
      rank.check(!sharded(chain.model->layers[0]->weight).grad().defined(), "another");
      chain.model->zero_grad();
    }
    chain.loss(rank.index(), 0).backward();
    check_gradients(rank, *chain.model, expected, "a whole backward afterwards");
  });
}

TEST_CASE("forward and backward may run in different threads", "[runtime][many_passes]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    for (int step = 0; step < 2; ++step) {
      auto loss = chain.loss(rank.index(), step);
      std::exception_ptr error;
      std::thread backward([&] {
        try {
          loss.backward();
        } catch (...) {
          error = std::current_exception();
        }
      });
      backward.join();
      if (error) std::rethrow_exception(error);
      check_gradients(rank, *chain.model, averaged_gradients(plain, 2, step), fmt::format("step {}", step));
      chain.model->zero_grad();
    }
  });
}

}  // namespace
}  // namespace fsdp::test
