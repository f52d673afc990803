#include <catch2/catch.hpp>

#include "support/models.hpp"

// State lives and dies with the module; several roots in one program.

namespace fsdp::test {
namespace {

namespace nn = torch::nn;

TEST_CASE("the controls are found from the module, and only from a sharded one", "[runtime][lifetime]") {
  on_ranks(2, [](Rank& rank) {
    auto model = plain_chain(2);
    auto layer = fully_shard(model->layers[0], {.mesh = rank.mesh()});
    auto root = fully_shard(model, {.mesh = rank.mesh()});
    auto found = find_fsdp_module(*model->layers[0]);
    rank.check(found && *found == layer, "the same state");
    rank.check(!find_fsdp_module(*model->layers[1]), "not sharded");
    rank.check(!find_fsdp_module(*nn::Linear(2, 2)), "another module");
    Inputs inputs(rank.index(), 0);
    model->forward(inputs.normal({2, 6})).sum().backward();
    rank.check(root.is_root() && !layer.is_root(), "the root");
    rank.check_equal(root.name(), std::string(), "its name");
    rank.check_equal(layer.name(), std::string("layer0"), "the layer's name");
    rank.check(root.mesh() == rank.mesh(), "its mesh");
    auto modules = root.sharded_modules();
    rank.check(modules.size() == 2 && modules[0] == root && modules[1] == layer,
               "depth first");
  });
}

TEST_CASE("roots are the sharded modules that no other contains", "[runtime][lifetime]") {
  on_ranks(2, [](Rank& rank) {
    auto model = plain_chain(3);
    auto first = fully_shard(model->layers[0], {.mesh = rank.mesh()});
    auto second = fully_shard(model->layers[2], {.mesh = rank.mesh()});
    auto top = roots(*model);
    rank.check(top.size() == 2 && top[0] == first && top[1] == second, "two");
    fully_shard(model, {.mesh = rank.mesh()});
    rank.check_equal(roots(*model).size(), size_t{1}, "now one");
    rank.check(roots(*nn::Linear(2, 2)).empty(), "none");
  });
}

TEST_CASE("a program may hold several roots, and one model several", "[runtime][lifetime]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    auto model = plain_chain();
    for (auto& layer : model->layers) fully_shard(layer, {.mesh = rank.mesh()});
    fully_shard(model->head, {.mesh = rank.mesh()});
    ShardedChain other(rank.mesh());
    for (int step = 0; step < 3; ++step) {
      auto expected = averaged_gradients(plain, 2, step);
      Inputs inputs(rank.index(), step);
      model->zero_grad();
      other.model->zero_grad();
      auto loss = model->forward(inputs.normal({4, 6})).square().mean() + other.loss(rank.index(), step);
      loss.backward();
      check_gradients(rank, *model, expected, "four roots");
      check_gradients(rank, *other.model, expected, "one root");
    }
  });
}

TEST_CASE("one root's output feeds another, as generator and critic do", "[runtime][lifetime]") {
  on_ranks(2, [](Rank& rank) {
    auto make = [] { return std::make_pair(nn::Linear(3, 6), Chain(2)); };
    auto [plain_front, plain_back] = seeded(8, make);
    auto [front, back] = seeded(8, make);
    fully_shard(front, {.mesh = rank.mesh()});
    for (auto& layer : back->layers) fully_shard(layer, {.mesh = rank.mesh()});
    fully_shard(back, {.mesh = rank.mesh()});
    for (int step = 0; step < 3; ++step) {
      for (auto* module : std::initializer_list<nn::Module*>{&*plain_front, &*plain_back, &*front, &*back}) module->zero_grad();
      for (int r = 0; r < 2; ++r)
        plain_back->forward(plain_front->forward(Inputs(r, step).normal({2, 3}))).square().mean().backward();
      back->forward(front->forward(Inputs(rank.index(), step).normal({2, 3}))).square().mean().backward();
      rank.check_close(sharded(front->weight).grad(), rows_of(plain_front->weight.grad() / 2, rank.index(), 2), "front");
      rank.check_close(sharded(back->layers[0]->weight).grad(),
                       rows_of(plain_back->layers[0]->weight.grad() / 2, rank.index(), 2), "back");
    }
  });
}

TEST_CASE("tensors that the user kept beyond the module's life stay safe", "[runtime][lifetime]") {
  on_ranks(2, [](Rank& rank) {
    at::Tensor handle, view, parameter;
    {
      ShardedChain chain(rank.mesh());
      chain.step(rank.index());
      handle = chain.model->layers[0]->weight;
      view = handle.detach();
      parameter = sharded(handle);
    }
    rank.check_equal(parameter.sizes().vec(), std::vector<int64_t>{6, 6}, "the parameter kept lives");
    rank.check_equal(to_local(parameter).sizes().vec(), std::vector<int64_t>{3, 6}, "and its piece");
    {
      at::NoGradGuard no_grad;
      rank.check_close(parameter.norm(), plain_chain()->layers[0]->weight.norm(), "and is readable");
    }
    // The group lives on with its unsharded parameters: they are gathered as ever.
    for (auto& tensor : {handle, view}) {
      at::NoGradGuard no_grad;
      rank.check_identical(tensor + 0, plain_chain()->layers[0]->weight, "the whole values");
    }
  });
}

TEST_CASE("controls that outlive the module are safe", "[runtime][lifetime]") {
  on_ranks(2, [](Rank& rank) {
    auto chain = std::make_unique<ShardedChain>(rank.mesh());
    chain->step(rank.index());
    auto root = chain->root[0];
    chain->model = Chain(nullptr);
    chain.reset();
    root.reshard();
    root.set_requires_gradient_sync(true);
    rank.check(root.is_unsharded(), "as every module without parameters");
  });
}

TEST_CASE("a backward may outlive the module", "[runtime][lifetime]") {
  on_ranks(2, [](Rank& rank) {
    at::Tensor loss, parameter;
    auto plain = plain_chain();
    {
      ShardedChain chain(rank.mesh());
      chain.step(rank.index());
      loss = chain.loss(rank.index(), 1);
      parameter = sharded(chain.model->layers[0]->weight);
    }
    loss.backward();
    rank.check_close(parameter.grad(), rows_of(averaged_gradients(plain, 2, 1)[0].second, rank.index(), 2),
                     "the gradient of a parameter that was kept");
  });
}

TEST_CASE("a new module at the address of an old one has no state", "[runtime][lifetime]") {
  on_ranks(1, [](Rank& rank) {
    for (int i = 0; i < 50; ++i) {
      nn::Linear net(3, 3);
      rank.check(!find_fsdp_module(*net), "fresh");
      fully_shard(net, {.mesh = rank.mesh()});
      rank.check(find_fsdp_module(*net).has_value(), "sharded");
    }
  });
}

TEST_CASE("a module on the stack without parameters of its own can be made again", "[runtime][lifetime]") {
  struct Net : nn::Module {
    nn::Linear inner = register_module("inner", nn::Linear(3, 3));
  };
  on_ranks(2, [](Rank& rank) {
    for (int i = 0; i < 3; ++i) {
      Net net;
      fully_shard(net.inner, {.mesh = rank.mesh()});
      fully_shard(net, {.mesh = rank.mesh()});
      rank.check(find_fsdp_module(net)->sharded_modules().size() == 2, "sharded");
    }
  });
}

}  // namespace
}  // namespace fsdp::test
