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

TEST_CASE("written between forward and backward, in any step and by any operator, weights are refused as in the plain module or taken as "
          "there: all old ones, or all new ones",
          "[runtime][stale_weights]") {
  using Parameters = std::vector<at::Tensor>;
  struct Way {
    std::string name;
    std::function<void(Parameters)> write;
    bool by_members = false;
  };
  const auto in_pairs = [](auto write) {
    return [write](Parameters parameters) {
      const at::NoGradGuard no_grad;
      for (auto& parameter : parameters) write(parameter);
    };
  };
  const auto optimize = [](auto make) {
    return [make](Parameters parameters) {
      for (auto& parameter : parameters) parameter.mutable_grad() = torch::ones_like(parameter.detach());
      auto optimizer = make(parameters);
      optimizer.step();
      for (auto& parameter : parameters) parameter.mutable_grad() = at::Tensor();
    };
  };
  std::vector<Way> ways{
      {"mul_", in_pairs([](at::Tensor& p) { p.mul_(2); })},
      {"add_ of a whole", in_pairs([](at::Tensor& p) { p.add_(torch::ones(p.sizes())); })},
      {"copy_", in_pairs([](at::Tensor& p) { p.copy_(torch::full(p.sizes(), 0.3)); })},
      {"clamp_", in_pairs([](at::Tensor& p) { p.clamp_(-0.1, 0.1); })},
      {"sort into it", in_pairs([](at::Tensor& p) { p.view(-1).copy_(std::get<0>(p.view(-1).sort())); })},
      {"foreach", [](Parameters all) { const at::NoGradGuard no_grad; at::_foreach_mul_(all, 2); }},
      {"the last alone", [](Parameters all) { const at::NoGradGuard no_grad; all[all.size() - 2].mul_(2); }},
      {"the second alone", [](Parameters all) { const at::NoGradGuard no_grad; all[2].mul_(2); }},
      {"Adam", optimize([](const Parameters& all) { return torch::optim::Adam(all, torch::optim::AdamOptions(0.1)); })},
      {"data().mul_", in_pairs([](at::Tensor& p) { p.data().mul_(2); })},
      {"data() of the second", [](Parameters all) { all[2].data().mul_(2); }},
      {"data().copy_", in_pairs([](at::Tensor& p) { p.data().copy_(torch::full(p.sizes(), 0.3)); })},
      {"a view of data()", in_pairs([](at::Tensor& p) { p.data().view(-1).mul_(2); })},
      {"a part of data()", in_pairs([](at::Tensor& p) { p.data()[0].fill_(0.3); })},
      {"sort into data()", in_pairs([](at::Tensor& p) { p.data().view(-1).copy_(std::get<0>(p.data().view(-1).sort())); })},
      {"SGD", optimize([](const Parameters& all) { return torch::optim::SGD(all, torch::optim::SGDOptions(0.1)); })},
      {"RMSprop", optimize([](const Parameters& all) { return torch::optim::RMSprop(all, torch::optim::RMSpropOptions(0.1)); })},
  };
  for (size_t i = ways.size(); i-- > 0;)
    if (ways[i].name.find("of data()") == std::string::npos && ways[i].name.find("alone") == std::string::npos)
      ways.push_back({ways[i].name + " by members", ways[i].write, true});
  ways.push_back({"data() less a multiple of data()", [](Parameters all) { for (auto& p : all) p.data() -= 0.5 * p.data(); }, true});
  for (const int ranks : {1, 2})
    for (const int steps_before : {0, 1})
      CHECK(on_ranks(ranks, [&](Rank& rank) {
        for (const auto& way : ways) {
          auto plain = plain_chain();
          const auto reshard = way.name.size() % 2 == 0 ? ReshardAfterForward() : ReshardAfterForward(ranks);
          ShardedChain chain(rank.mesh(), 3, 6, reshard);
          const auto x = torch::linspace(-1, 1, 24).view({4, 6});
          const auto what = fmt::format("{}, {} steps before", way.name, steps_before);
          const auto run = [&](torch::nn::Module& module, const std::function<at::Tensor()>& forward) -> std::string {
            for (int i = 0; i < steps_before; ++i) forward().backward();
            for (auto& parameter : module.parameters()) parameter.mutable_grad() = at::Tensor();
            const auto loss = forward();
            auto parameters = module.parameters();
            if (way.by_members)
              for (auto& parameter : parameters)
                if (is_fsdp_parameter(parameter)) parameter = fsdp::unsharded(parameter);
            way.write(std::move(parameters));
            try {
              loss.backward();
            } catch (const c10::Error& error) {
              return message_of(error);
            }
            return {};
          };
          const auto expected = run(*plain, [&] { return plain->forward(x).square().mean(); });
          const auto found = run(*chain.model, [&] { return chain.model->forward(x).square().mean(); });
          rank.check_equal(found.empty(), expected.empty(), what + ": goes on");
          if (!expected.empty()) {
            rank.check(found.find("modified by an inplace operation") != std::string::npos, what + ": says " + found);
            continue;
          }
          const auto registered = chain.model->named_parameters();
          for (auto& parameter : plain->named_parameters()) {
            rank.check_close(full_tensor(registered[parameter.key()]), parameter.value(), what + ": " + parameter.key());
            rank.check_close(full_grad(registered[parameter.key()]), parameter.value().grad(), what + ": gradient of " + parameter.key());
          }
        }
      }));
}

TEST_CASE("a step through data() between two backwards of one graph is taken by the second, as in the plain module", "[runtime][stale_weights]") {
  for (const int ranks : {1, 2})
    CHECK(on_ranks(ranks, [](Rank& rank) {
      auto plain = plain_chain();
      ShardedChain chain(rank.mesh());
      const auto x = torch::linspace(-1, 1, 24).view({4, 6});
      const auto run = [&](torch::nn::Module& module, const at::Tensor& loss) {
        torch::optim::SGD optimizer(module.parameters(), 0.5);
        loss.backward({}, /*retain_graph=*/true);
        optimizer.step();
        optimizer.zero_grad();
        loss.backward();
      };
      run(*plain, plain->forward(x).square().mean());
      run(*chain.model, chain.model->forward(x).square().mean());
      const auto registered = chain.model->named_parameters();
      for (auto& parameter : plain->named_parameters())
        rank.check_close(full_grad(registered[parameter.key()]), parameter.value().grad(), "gradient of " + parameter.key());
    }));
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
