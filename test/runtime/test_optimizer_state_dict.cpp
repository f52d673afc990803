#include <catch2/catch.hpp>

#include "support/models.hpp"
#include "support/odd_model.hpp"

// State dicts of optimizers: kinds, keys, worlds.

namespace fsdp::test {
namespace {

namespace optim = torch::optim;
using at::Tensor;
using Optimizer = std::unique_ptr<optim::Optimizer>;
using MakeOptimizer = std::function<Optimizer(const std::vector<optim::OptimizerParamGroup>&)>;

struct Kind {
  std::string name;
  MakeOptimizer make;
};

/// Every optimizer that is known, with all of its state in use.
std::vector<Kind> kinds() {
  using Groups = const std::vector<optim::OptimizerParamGroup>&;
  return {
      {"AdamW", [](Groups g) { return std::make_unique<optim::AdamW>(g, optim::AdamWOptions(0.02).eps(1e-2).amsgrad(true)); }},
      {"Adam", [](Groups g) { return std::make_unique<optim::Adam>(g, optim::AdamOptions(0.02).eps(1e-2).betas({0.8, 0.95})); }},
      {"SGD", [](Groups g) { return std::make_unique<optim::SGD>(g, optim::SGDOptions(0.05).momentum(0.9).nesterov(true)); }},
      {"Adagrad", [](Groups g) { return std::make_unique<optim::Adagrad>(g, optim::AdagradOptions(0.05).lr_decay(0.1)); }},
      {"RMSprop", [](Groups g) { return std::make_unique<optim::RMSprop>(g, optim::RMSpropOptions(0.01).momentum(0.5).centered(true).eps(1e-2)); }},
  };
}

/// Two groups: biases and scale, and the rest.
Optimizer make_optimizer(const Kind& kind, Odd& model) {
  std::vector<Tensor> biases, others;
  for (auto& [name, parameter] : unique_parameters(*model))
    (name.ends_with("bias") || name == "scale" ? biases : others).push_back(parameter);
  return kind.make({optim::OptimizerParamGroup(biases), optim::OptimizerParamGroup(others)});
}

/// The same batch on every rank, so that averaging changes nothing.
void train(Odd& model, optim::Optimizer& optimizer, int first, int steps) {
  model->eval();
  for (int step = first; step < first + steps; ++step) {
    optimizer.zero_grad();
    Inputs in(0, step);
    model->loss(in).backward();
    optimizer.step();
  }
  optimizer.zero_grad();
}

void check_close(const Rank& rank, const OptimizerStateDict& found, const OptimizerStateDict& expected, const std::string& what) {
  rank.check_equal(found.state.size(), expected.state.size(), what + ": parameters with state");
  rank.check_equal(found.optimizer, expected.optimizer, what + ": class");
  rank.check_equal(found.groups.size(), expected.groups.size(), what + ": groups");
  for (size_t i = 0; i < std::min(found.groups.size(), expected.groups.size()); ++i) {
    rank.check_equal(found.groups[i].params, expected.groups[i].params, what + ": parameters of a group");
    rank.check(found.groups[i].options == expected.groups[i].options, what + ": options of a group");
  }
  for (auto& [key, state] : expected.state) {
    auto other = found.state.find(key);
    rank.check(other != found.state.end(), what + ": has " + key);
    if (other == found.state.end()) continue;
    rank.check(other->second.step == state.step, what + ": step of " + key);
    rank.check_equal(other->second.tensors.size(), state.tensors.size(), what + ": tensors of " + key);
    for (auto& [name, entry] : state.tensors) {
      auto tensor = other->second.tensors.find(name);
      rank.check(tensor != other->second.tensors.end(), what + ": " + key + " has " + name);
      if (tensor != other->second.tensors.end())
        rank.check_close(tensor->second.value, entry.value, what + ": " + name + " of " + key, 1e-4);
    }
  }
}

void check_same(const Rank& rank, const OptimizerStateDict& found, const OptimizerStateDict& expected, const std::string& what) {
  check_close(rank, found, expected, what);
  for (auto& [key, state] : expected.state)
    for (auto& [name, entry] : state.tensors)
      if (found.state.contains(key) && found.state.at(key).tensors.contains(name))
        rank.check_identical(found.state.at(key).tensors.at(name).value, entry.value, what + ": " + name + " of " + key);
}

TEST_CASE("the full state of every optimizer is the plain one's, and continues it", "[runtime][optimizer_state_dict]") {
  for (const auto& kind : kinds())
    on_odd_cases([&](Rank& rank, const OddCase& odd) {
      auto what = kind.name + " on " + odd.name;
      auto plain = plain_odd(), model = plain_odd();
      shard_odd(model, rank, odd);
      auto optimizer = make_optimizer(kind, model), plain_optimizer = make_optimizer(kind, plain);
      train(model, *optimizer, 0, 2);
      train(plain, *plain_optimizer, 0, 2);
      auto expected = optimizer_state_dict(*plain, *plain_optimizer);
      check_close(rank, optimizer_state_dict(*model, *optimizer), expected, what);
      rank.check(kind.name == "SGD" || expected.state.at("lin.weight").step == 2, "steps are counted");

      // Into a fresh model and optimizer, which then train on as if nothing had happened.
      auto resumed = plain_odd(8);
      shard_odd(resumed, rank, odd);
      auto other = make_optimizer(kind, resumed);
      other->param_groups()[1].options().set_lr(0.5);
      load_state_dict(resumed, state_dict(plain));
      rank.check(load_optimizer_state_dict(*resumed, *other, expected).empty(), what + ": fits");
      check_same(rank, optimizer_state_dict(*resumed, *other), expected, what + ", loaded");
      train(resumed, *other, 2, 2);
      train(plain, *plain_optimizer, 2, 2);
      auto weights = state_dict(resumed);
      for (auto& [name, parameter] : unique_parameters(*plain))
        rank.check_close(weights.find(name)->value, parameter.detach(), what + ", resumed: " + name, 1e-4);
    });
}

TEST_CASE("sharded and local state load back without communication", "[runtime][optimizer_state_dict]") {
  for (const auto& kind : {kinds()[0], kinds()[4]})
    on_odd_cases([&](Rank& rank, const OddCase& odd) {
      auto model = plain_odd();
      shard_odd(model, rank, odd);
      auto optimizer = make_optimizer(kind, model);
      train(model, *optimizer, 0, 2);
      auto full = optimizer_state_dict(*model, *optimizer);
      for (auto values : {StateDictKind::kSharded, StateDictKind::kLocal}) {
        rank.log().clear();
        auto dict = optimizer_state_dict(*model, *optimizer, {.values = {.kind = values, .cpu_offload = true}});
        auto other = make_optimizer(kind, model);
        load_optimizer_state_dict(*model, *other, dict);
        rank.check_equal(rank.log().calls.size(), size_t{0}, "nothing is communicated");
        check_same(rank, optimizer_state_dict(*model, *other), full, kind.name + " on " + odd.name);
      }
      auto shared = optimizer_state_dict(*model, *optimizer, {.values = {.kind = StateDictKind::kSharded}});
      auto& entry = shared.state.at("lin.weight").tensors.begin()->second;
      rank.check_identical(entry.dtensor.full_tensor(), full.state.at("lin.weight").tensors.begin()->second.value, "a DTensor");
    });
}

TEST_CASE("state saved at one world size is the same after loading at another", "[runtime][optimizer_state_dict]") {
  auto kind = kinds()[0];
  std::vector<StateDict> weights(1);
  std::vector<OptimizerStateDict> states(1);
  on_ranks(3, [&](Rank& rank) {
    auto model = plain_odd();
    shard_odd(model, rank, {});
    auto optimizer = make_optimizer(kind, model);
    train(model, *optimizer, 0, 2);
    auto dict = state_dict(model, {.rank0_only = true});
    auto state = optimizer_state_dict(*model, *optimizer, {.values = {.rank0_only = true}});
    rank.check_equal(state.groups.empty(), rank.index() != 0, "on rank 0 alone");
    if (rank.index() == 0) {
      weights[0] = dict;
      states[0] = state;
    }
  });
  for (bool broadcast : {false, true})
    on_odd_cases([&](Rank& rank, const OddCase& odd) {
      auto model = plain_odd(8);
      shard_odd(model, rank, odd);
      auto optimizer = make_optimizer(kind, model);
      train(model, *optimizer, 5, 1);
      optimizer->param_groups()[0].options().set_lr(0.7);
      const bool has_dict = !broadcast || rank.index() == 0;
      const LoadOptions options{.broadcast_from_rank0 = broadcast};
      load_state_dict(model, has_dict ? weights[0] : StateDict{}, options);
      load_optimizer_state_dict(*model, *optimizer, has_dict ? states[0] : OptimizerStateDict{}, options);
      check_same(rank, optimizer_state_dict(*model, *optimizer), states[0], odd.name);
      rank.check_identical(state_dict(model).find("conv.weight")->value, weights[0].find("conv.weight")->value, "weights");
    });
}

TEST_CASE("full state goes into a plain module's optimizer, sharded state onto another mesh", "[runtime][optimizer_state_dict]") {
  on_ranks(4, [](Rank& rank) {
    auto kind = kinds()[4];
    auto model = plain_odd();
    shard_odd(model, rank, {"1-D", 4});
    auto optimizer = make_optimizer(kind, model);
    train(model, *optimizer, 0, 2);
    auto full = optimizer_state_dict(*model, *optimizer);
    auto plain = plain_odd();
    auto plain_optimizer = make_optimizer(kind, plain);
    load_optimizer_state_dict(*plain, *plain_optimizer, full);
    check_same(rank, optimizer_state_dict(*plain, *plain_optimizer), full, "plain");
    auto sharded = optimizer_state_dict(*model, *optimizer, {.values = {.kind = StateDictKind::kSharded}});
    for (auto odd : {OddCase{"2 x 2", 4, 2}, OddCase{"replicas", 4, 0, true}}) {
      auto other = plain_odd();
      shard_odd(other, rank, odd);
      auto other_optimizer = make_optimizer(kind, other);
      load_optimizer_state_dict(*other, *other_optimizer, sharded);
      check_same(rank, optimizer_state_dict(*other, *other_optimizer), full, odd.name);
    }
  });
}

TEST_CASE("local state of another layout is refused on all ranks, also where a rank's part is the same in both",
          "[runtime][optimizer_state_dict]") {
  on_ranks(4, [](Rank& rank) {
    const auto trained = [&](const FullyShardOptions& options, double input) {
      torch::nn::Linear net = seeded(3, [] { return torch::nn::Linear(3, 2); });  // two rows for four ranks
      fully_shard(net, options);
      auto optimizer = std::make_unique<optim::SGD>(net->parameters(), optim::SGDOptions(0.1).momentum(0.9));
      net->forward(torch::full({1, 3}, input)).sum().backward();
      optimizer->step();
      return std::pair(net, std::move(optimizer));
    };
    const StateDictOptions local{.kind = StateDictKind::kLocal};
    const auto [source, source_optimizer] = trained({.mesh = rank.mesh()}, 1);
    const auto [net, optimizer] = trained({.mesh = rank.hybrid(2, 2)}, 2);
    const auto before = optimizer_state_dict(*net, *optimizer);
    const auto dict = optimizer_state_dict(*source, *source_optimizer, {.values = local});
    rank.check_throws<UsageError>([&] { load_optimizer_state_dict(*net, *optimizer, dict); },
                                  {"'weight'", "'bias'", "of another layout"}, "2 x 2");
    check_same(rank, optimizer_state_dict(*net, *optimizer), before, "unchanged");
    load_optimizer_state_dict(*source, *source_optimizer, dict);
  });
}

TEST_CASE("keys turn from names to positions and back", "[runtime][optimizer_state_dict]") {
  on_ranks(2, [](Rank& rank) {
    auto kind = kinds()[0];
    auto model = plain_odd();
    shard_odd(model, rank, {});
    auto optimizer = make_optimizer(kind, model);
    train(model, *optimizer, 0, 1);
    auto by_name = optimizer_state_dict(*model, *optimizer);
    auto by_position = optimizer_state_dict(*model, *optimizer, {.keys = OptimizerKeys::kPosition});
    rank.check_equal(by_position.groups[0].params.front(), std::string("0"), "the first position");
    rank.check_equal(by_position.groups[1].params.front(), std::to_string(by_name.groups[0].params.size()), "groups follow each other");
    check_same(rank, rekey(by_name, OptimizerKeys::kPosition, *model, *optimizer), by_position, "to positions");
    check_same(rank, rekey(by_position, OptimizerKeys::kName, *model, *optimizer), by_name, "to names");
    auto other = make_optimizer(kind, model);
    load_optimizer_state_dict(*model, *other, by_position);
    check_same(rank, optimizer_state_dict(*model, *other), by_name, "loaded by position");
    std::reverse(by_name.groups[0].params.begin(), by_name.groups[0].params.end());
    load_optimizer_state_dict(*model, *other, by_name);
    check_same(rank, optimizer_state_dict(*model, *other, {.keys = OptimizerKeys::kPosition}), by_position, "names in any order");
  });
}

TEST_CASE("parameters without a step have no state, before and after", "[runtime][optimizer_state_dict]") {
  on_ranks(2, [](Rank& rank) {
    auto kind = kinds()[0];
    auto model = plain_odd();
    shard_odd(model, rank, {});
    auto optimizer = make_optimizer(kind, model);
    auto fresh = optimizer_state_dict(*model, *optimizer);
    rank.check(fresh.state.empty() && fresh.groups.size() == 2, "none yet");
    train(model, *optimizer, 0, 1);
    rank.check(!optimizer_state_dict(*model, *optimizer).state.contains("frozen"), "frozen ones never");
    load_optimizer_state_dict(*model, *optimizer, fresh);
    rank.check(optimizer->state().empty(), "as in the dict");
  });
}

TEST_CASE("an optimizer state that does not fit is named, and nothing changes", "[runtime][optimizer_state_dict]") {
  for (bool broadcast : {false, true})
    on_ranks(2, [&](Rank& rank) {
      auto kind = kinds()[0];
      auto model = plain_odd();
      shard_odd(model, rank, {});
      auto optimizer = make_optimizer(kind, model);
      train(model, *optimizer, 0, 2);
      auto before = optimizer_state_dict(*model, *optimizer, {.values = {.cpu_offload = true}});
      auto dict = before;
      std::erase(dict.groups[0].params, "lin.bias");
      dict.groups[0].params.push_back("stranger");
      dict.groups[0].options.erase("eps");
      dict.state.at("lin.weight").tensors.at("exp_avg") = {.value = torch::ones({2}), .sizes = {2}};
      dict.state.at("embed.weight").step.reset();
      dict.state.at("conv.weight").tensors["momentum"] = dict.state.at("conv.weight").tensors.at("exp_avg");
      if (broadcast && rank.index() == 1) dict = {};
      LoadOptions options{.broadcast_from_rank0 = broadcast};
      rank.check_throws<UsageError>([&] { load_optimizer_state_dict(*model, *optimizer, dict, options); },
                                    {"'lin.bias'", "'eps' of parameter group 0", "Unexpected: 'stranger'",
                                     "'lin.weight' exp_avg has sizes (2), expected (5, 5)",
                                     "'embed.weight' has no step", "'conv.weight' has state that AdamW does not have"},
                                    "misfit");
      check_same(rank, optimizer_state_dict(*model, *optimizer), before, "nothing changed");
      dict = before;
      dict.groups[1].options["lr"] = 0.25;
      dict.state.at("norm.weight").tensors.at("exp_avg").value.fill_(3);
      dict.state.at("lin.weight").tensors.at("exp_avg") = {.value = torch::ones({2}), .sizes = {2}};
      if (broadcast && rank.index() == 1) dict = {};
      options.strict = false;
      auto result = load_optimizer_state_dict(*model, *optimizer, dict, options);
      rank.check_equal(result.wrong.size(), size_t{1}, "what does not fit");
      auto now = optimizer_state_dict(*model, *optimizer);
      rank.check_identical(now.state.at("norm.weight").tensors.at("exp_avg").value, torch::full({5}, 3.F), "what fits is loaded");
      rank.check_identical(now.state.at("lin.weight").tensors.at("exp_avg").value, before.state.at("lin.weight").tensors.at("exp_avg").value, "the rest is left");
      rank.check_equal(optimizer->param_groups()[1].options().get_lr(), 0.25, "lr");
    });
}

TEST_CASE("another optimizer, an unsharded parameter and a stranger's parameter are refused by name", "[runtime][optimizer_state_dict]") {
  on_ranks(2, [](Rank& rank) {
    auto model = plain_odd();
    optim::SGD early(model->lin->parameters(), 0.1);
    shard_odd(model, rank, {});
    rank.check_throws<UsageError>([&] { optimizer_state_dict(*model, early); }, {"lin.weight", "adopt"}, "unsharded parameters");
    adopt(early);
    auto sgd = optimizer_state_dict(*model, early);
    auto adamw = make_optimizer(kinds()[0], model);
    rank.check_throws<UsageError>([&] { load_optimizer_state_dict(*model, *adamw, sgd); }, {"SGD's, expected AdamW's"}, "class");
    optim::LBFGS lbfgs(model->parameters());
    rank.check_throws<UsageError>([&] { optimizer_state_dict(*model, lbfgs); }, {"AdamW", "another optimizer"}, "LBFGS");
    optim::SGD stranger({torch::ones({3})}, 0.1);
    rank.check_throws<UsageError>([&] { optimizer_state_dict(*model, stranger); }, {"not one of the module's"}, "stranger");
  });
}

TEST_CASE("ranks with state for different parameters learn of it instead of waiting", "[runtime][optimizer_state_dict]") {
  on_ranks(2, [](Rank& rank) {
    auto model = plain_chain(1);
    fully_shard(model, {.mesh = rank.mesh()});
    optim::AdamW optimizer(model->parameters());
    auto parameter = model->parameters()[rank.index()];
    parameter.mutable_grad() = torch::ones_like(parameter);
    optimizer.step();
    rank.check_throws<StateError>([&] { optimizer_state_dict(*model, optimizer); }, {"different parameters"}, "full");
  });
}

}  // namespace
}  // namespace fsdp::test
