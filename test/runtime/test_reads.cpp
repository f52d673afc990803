#include <catch2/catch.hpp>

#include "support/models.hpp"

// What gathers and what does not; reads outside a step.

namespace fsdp::test {
namespace {

using at::Tensor;
using Calls = std::vector<std::string>;

TEST_CASE("shape and view operators never gather", "[runtime][reads]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    auto& weight = chain.model->layers[0]->weight;
    weight.sizes();
    weight.t();
    weight.view({-1});
    weight.detach();
    weight.narrow(0, 1, 2);
    weight[1];
    weight.expand({2, 6, 6});
    weight.permute({1, 0});
    weight.unsqueeze(0);
    weight.split(2);
    weight.unbind();
    weight.chunk(3);
    weight.select(1, 0);
    weight.diagonal();
    weight.alias();
    torch::empty_like(weight);
    torch::zeros_like(weight);
    weight.new_zeros({2});
    {
      at::NoGradGuard no_grad;
      weight.t().view({-1, 6});
    }
    rank.check(rank.log().calls.empty(), fmt::format("gathered: {}", rank.calls()));
    rank.check(!chain.layers[0].is_unsharded(), "still sharded");
  });
}

TEST_CASE("a read outside a step gathers and gives the full value", "[runtime][reads]") {
  on_ranks(3, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    for (int step = 0; step < 3; ++step) {
      {
        at::NoGradGuard no_grad;
        rank.log().clear();
        rank.check_close(chain.model->layers[1]->weight.norm(), plain->layers[1]->weight.norm(), "norm");
        rank.check_equal(rank.subjects_of("all_gather"), Calls{"layer1"}, "one gather");
        rank.check_close(chain.model->head->bias.clone(), plain->head->bias.clone(), "clone of the root's");
        rank.check(chain.model->layers[2]->bias.sum().item<float>() == plain->layers[2]->bias.sum().item<float>(), "item");
      }
      chain.model->zero_grad();
      chain.loss(rank.index(), step).backward();
      check_gradients(rank, *chain.model, averaged_gradients(plain, 3, step), fmt::format("step {}", step));
    }
  });
}

TEST_CASE("a logged norm with autograd on, outside the forward, does not disturb training", "[runtime][reads]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    for (int step = 0; step < 3; ++step) {
      rank.check_close(chain.model->layers[1]->weight.norm().detach(), plain->layers[1]->weight.norm().detach(), "before");
      chain.model->zero_grad();
      auto loss = chain.loss(rank.index(), step);
      rank.check_close(chain.model->layers[0]->weight.norm().detach(), plain->layers[0]->weight.norm().detach(), "between");
      loss.backward();
      rank.check_close(chain.model->head->weight.norm().detach(), plain->head->weight.norm().detach(), "after");
      check_gradients(rank, *chain.model, averaged_gradients(plain, 2, step), fmt::format("step {}", step));
    }
  });
}

TEST_CASE("reads between backward and the optimizer, and after it, see the current weights", "[runtime][reads]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    torch::optim::SGD sgd(chain.model->parameters(), 0.5), plain_sgd(plain->parameters(), 0.5);
    for (int step = 0; step < 3; ++step) {
      auto expected = averaged_gradients(plain, 2, step);
      for (size_t i = 0; i < expected.size(); ++i) plain->parameters()[i].mutable_grad() = expected[i].second;
      chain.model->zero_grad();
      chain.loss(rank.index(), step).backward();
      at::NoGradGuard no_grad;
      for (bool stepped : {false, true}) {
        if (stepped) sgd.step(), plain_sgd.step();
        for (int i = 0; i < 3; ++i)
          rank.check_close(chain.model->layers[i]->weight.clone(), plain->layers[i]->weight.clone(),
                           fmt::format("step {}, layer {}, optimizer {}", step, i, stepped ? "done" : "to come"));
        rank.check_close(chain.model->head->weight.clone(), plain->head->weight.clone(), "the root's");
      }
    }
  });
}

TEST_CASE("with kThrow a touch outside step and scope names the parameter; a scope allows eval", "[runtime][reads]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain(1);
    auto model = plain_chain(1);
    fully_shard(model->layers[0], {.mesh = rank.mesh(), .fault_outside_step = FaultOutsideStep::kThrow});
    auto root = fully_shard(model, {.mesh = rank.mesh(), .fault_outside_step = FaultOutsideStep::kThrow});
    auto x = torch::ones({1, 6});
    for (int step = 0; step < 2; ++step) {
      {
        at::NoGradGuard no_grad;
        rank.log().clear();
        rank.check_throws<StateError>([&] { model->layers[0]->weight.norm(); }, {"layer0.weight"}, "a read");
        rank.check_throws<StateError>([&] { model->forward(x); }, {"layer0"}, "eval without a scope");
        rank.check(rank.log().calls.empty(), "nothing was gathered");
        rank.check_close(fsdp::call(model, x), plain->forward(x), "eval in a scope");
        auto scope = forward_scope(root);
        rank.check_close(model->layers[0]->weight.norm(), plain->layers[0]->weight.norm(), "a read in a scope");
      }
      model->forward(x).sum().backward();
      rank.check(sharded(model->layers[0]->weight).grad().defined(), "training needs no scope");
    }
  });
}

TEST_CASE("reading released storage by raw pointer throws, naming the parameter", "[runtime][reads]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    auto& weight = chain.model->layers[0]->weight;
    auto view = weight.detach().narrow(0, 1, 2);
    auto raw_reads_throw = [&](const std::string& when) {
      auto name = std::vector<std::string>{"layer0.weight"};
      rank.check_throws<std::exception>([&] { weight.data_ptr(); }, name, when + ": data_ptr");
      rank.check_throws<std::exception>([&] { weight.data_ptr<float>(); }, name, when + ": data_ptr<float>");
      rank.check_throws<std::exception>([&] { weight.const_data_ptr(); }, name, when + ": const_data_ptr");
      rank.check_throws<std::exception>([&] { weight.mutable_data_ptr(); }, name, when + ": mutable_data_ptr");
      rank.check_throws<std::exception>([&] { weight.accessor<float, 2>(); }, name, when + ": accessor");
      rank.check_throws<std::exception>([&] { view.const_data_ptr<float>(); }, name, when + ": a view");
    };
    raw_reads_throw("at first");
    chain.step(rank.index());
    raw_reads_throw("after a step");
    chain.layers[0].unshard();
    rank.check(weight.const_data_ptr<float>() != nullptr, "readable while unsharded");
    rank.check(view.const_data_ptr<float>() == weight.const_data_ptr<float>() + 6, "so is the view");
    chain.layers[0].reshard();
    raw_reads_throw("resharded");
  });
}

TEST_CASE("views made before a release read the right values afterwards", "[runtime][reads]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    auto view = chain.model->layers[0]->weight.detach().t();
    auto expected = plain->layers[0]->weight.detach().t();
    for (int step = 0; step < 2; ++step) {
      rank.check_identical(view.clone(), expected.clone(), "the view");
      chain.step(rank.index(), step);
    }
    torch::optim::SGD sgd(chain.model->parameters(), 1.0);
    chain.loss(rank.index(), 0).backward();
    sgd.step();
    rank.check_close(view.clone(), dtensor_of(chain.model->layers[0]->weight).full_tensor().detach().t(), "new values");
  });
}

}  // namespace
}  // namespace fsdp::test
