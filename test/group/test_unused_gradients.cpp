#include <catch2/catch.hpp>

#include "support/models.hpp"
#include "support/logged_lines.hpp"

// Gradients that no optimizer uses are warned of. A process says each text once, so every case has names of its
// own.

namespace fsdp::test {
namespace {

namespace nn = torch::nn;

/// Two groups: a layer called `name`, and the root with the head.
struct Net : nn::Module {
  explicit Net(const std::string& name)
      : layer(register_module(name, seeded(1, [] { return nn::Linear(4, 4); }))),
        head(register_module(name + "_head", seeded(2, [] { return nn::Linear(4, 2); }))) {}
  at::Tensor forward(const at::Tensor& x) { return head->forward(torch::tanh(layer->forward(x))); }

  void shard(const FullyShardOptions& options) {
    fully_shard(layer, options);
    fully_shard(*this, options);
  }
  void train(Rank& rank, int backwards, torch::optim::Optimizer* optimizer = nullptr) {
    for (int i = 0; i < backwards; ++i) {
      zero_grad();
      forward(torch::ones({1, 4})).sum().backward();
      for (const auto& parameter : parameters()) rank.check(parameter.grad().defined(), "a gradient");
      if (optimizer != nullptr) optimizer->step();
    }
  }
  nn::Linear layer, head;
};

/// How often a net of this name was warned of: of its first group to have been reduced, the head's.
int warnings(const LoggedLines& logged, const std::string& name, int backwards = 16) {
  return logged.count(
      fmt::format("'{}_head.weight': gradients were reduced in {} backwards, but no optimizer", name, backwards));
}

/// Of any net.
int all_warnings(const LoggedLines& logged) { return logged.count("gradients were reduced in"); }

}  // namespace

TEST_CASE("gradients reduced in 16 backwards without a write are warned of once for all groups of a root, by name",
          "[group][unused_gradients]") {
  const LoggedLines logged;
  const auto train = [](int backwards) {
    on_ranks(2, [&](Rank& rank) {
      Net net("nobody");
      net.shard({.mesh = rank.mesh()});
      net.train(rank, backwards);
    });
  };
  train(15);
  CHECK(all_warnings(logged) == 0);
  train(16);
  CHECK(warnings(logged, "nobody") == 1);
  CHECK(logged.count("call fsdp::adopt(optimizer)") == 1);
  train(40);
  CHECK(all_warnings(logged) == 1);
}

TEST_CASE("an optimizer from before fully_shard trains, adopted or not, as one from behind it does, and nobody is warned",
          "[group][unused_gradients]") {
  const LoggedLines logged;
  on_ranks(2, [](Rank& rank) {
    const FullyShardOptions options{.mesh = rank.mesh()};
    Net before("before"), adopted("adopted"), behind("behind"), plain("plain");
    torch::optim::SGD sgd_before(before.parameters(), 0.1), sgd_adopted(adopted.parameters(), 0.1),
        sgd_plain(plain.parameters(), 0.1);
    for (auto* net : {&before, &adopted, &behind}) net->shard(options);
    rank.check_equal(adopt(sgd_adopted), 4, "parameters moved over");
    torch::optim::SGD sgd_behind(behind.parameters(), 0.1);
    before.train(rank, 20, &sgd_before);
    adopted.train(rank, 20, &sgd_adopted);
    behind.train(rank, 20, &sgd_behind);
    plain.train(rank, 20, &sgd_plain);
    for (const auto* net : {&before, &adopted, &behind})
      for (size_t i = 0; i < plain.parameters().size(); ++i)
        rank.check_close(full_tensor(net->parameters()[i]), plain.parameters()[i].detach(), fmt::format("parameter {}", i));
  });
  CHECK(all_warnings(logged) == 0);
}

TEST_CASE("one write within them is enough", "[group][unused_gradients]") {
  const LoggedLines logged;
  on_ranks(2, [](Rank& rank) {
    Net net("late");
    net.shard({.mesh = rank.mesh()});
    net.train(rank, 14);
    torch::optim::SGD(net.parameters(), 0.1).step();
    net.train(rank, 40);
  });
  CHECK(all_warnings(logged) == 0);
}

TEST_CASE("one rank is warned as several are", "[group][unused_gradients]") {
  const LoggedLines logged;
  on_ranks(1, [](Rank& rank) {
    Net net("alone"), trained("alone_and_trained");
    for (auto* each : {&net, &trained}) each->shard({.mesh = rank.mesh()});
    torch::optim::SGD sgd(trained.parameters(), 0.1);
    net.train(rank, 16);
    trained.train(rank, 16, &sgd);
  });
  CHECK(warnings(logged, "alone") == 1);
  CHECK(all_warnings(logged) == 1);
}

TEST_CASE("the number of backwards is an option, and 0 is never", "[group][unused_gradients]") {
  const LoggedLines logged;
  on_ranks(2, [](Rank& rank) {
    Net third("third"), never("never");
    third.shard({.mesh = rank.mesh(), .warn_after_unused_gradients = 3});
    never.shard({.mesh = rank.mesh(), .warn_after_unused_gradients = 0});
    third.train(rank, 3);
    never.train(rank, 20);
  });
  CHECK(warnings(logged, "third", 3) == 1);
  CHECK(all_warnings(logged) == 1);
}

TEST_CASE("first values are no optimizer's write, however they come in", "[group][unused_gradients]") {
  using Fill = std::function<void(Net&)>;
  const std::vector<std::pair<std::string, Fill>> fills = {
      {"filled_by_handle",
       [](Net& net) {
         for (auto* layer : {&net.layer, &net.head}) nn::init::constant_((*layer)->weight, 0.5);
       }},
      {"filled_by_parameter",
       [](Net& net) {
         at::NoGradGuard no_grad;
         for (auto& parameter : net.parameters()) parameter.fill_(0.5);
       }},
      {"filled_by_state_dict", [](Net& net) { load_state_dict(net, state_dict(net)); }},
      {"filled_in_scope",
       [](Net& net) {
         FullParameters scope(net);
         at::NoGradGuard no_grad;
         for (auto& parameter : net.parameters()) parameter.fill_(0.5);
       }},
  };
  for (const int ranks : {1, 2}) {
    for (const auto& [what, fill] : fills) {
      const auto name = fmt::format("{}_on_{}", what, ranks);
      CAPTURE(name);
      const LoggedLines logged;
      on_ranks(ranks, [&, fill = fill](Rank& rank) {
        Net net(name);
        net.shard({.mesh = rank.mesh()});
        fill(net);
        net.train(rank, 16);
      });
      CHECK(warnings(logged, name) == 1);
    }
  }
}

TEST_CASE("so are those that materialize gives", "[group][unused_gradients]") {
  const LoggedLines logged;
  on_ranks(2, [](Rank& rank) {
    auto net = [] {
      MetaDevice meta;
      return Net("made_on_meta");
    }();
    net.shard({.mesh = rank.mesh()});
    materialize(net, {.seed = 1});
    net.train(rank, 16);
  });
  CHECK(warnings(logged, "made_on_meta") == 1);
}

}  // namespace fsdp::test
