#include <catch2/catch.hpp>

#include "support/models.hpp"

// Frozen parameters and requires_grad toggled between steps.

namespace fsdp::test {
namespace {

TEST_CASE("frozen and trainable parameters share a group; the frozen take no part in the reduction",
          "[runtime][requires_grad]") {
  auto make = [] {
    auto workload = chain_workload();
    auto model = std::dynamic_pointer_cast<ChainImpl>(workload.module);
    model->layers[0]->weight.set_requires_grad(false);
    model->layers[1]->bias.set_requires_grad(false);
    for (auto& parameter : model->layers[2]->parameters()) parameter.set_requires_grad(false);
    return workload;
  };
  for (int world_size : {2, 3}) trains_like_plain(make, {.world_size = world_size});
  on_ranks(2, [](Rank& rank) {
    auto model = plain_chain();
    model->layers[0]->weight.set_requires_grad(false);
    for (auto& parameter : model->layers[1]->parameters()) parameter.set_requires_grad(false);
    for (auto& layer : model->layers) fully_shard(layer, {.mesh = rank.mesh()});
    fully_shard(model, {.mesh = rank.mesh()});
    Inputs inputs(rank.index(), 0);
    model->forward(inputs.normal({2, 6})).sum().backward();
    rank.check_equal(rank.subjects_of("reduce_scatter"), std::vector<std::string>{"root", "layer2", "layer0"}, "reduced");
    rank.check(rank.log().calls.back().bytes < 6 * 6 * 4, "layer0's bias alone is reduced");
  });
}

TEST_CASE("requires_grad toggled on what a member holds or on the parameter shows on both at once, and counts in the next step",
          "[runtime][requires_grad]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    auto run = [&](const std::string& what) {
      auto expected = averaged_gradients(plain, 2);
      chain.model->zero_grad();
      for (auto& parameter : chain.model->parameters()) parameter.mutable_grad() = at::Tensor();
      chain.loss(rank.index(), 0).backward();
      check_gradients(rank, *chain.model, expected, what);
      for (auto& [name, parameter] : unique_parameters(*chain.model))
        rank.check(parameter.requires_grad() == fsdp::unsharded(parameter).requires_grad(), what + ": both sides agree: " + name);
      for (auto& parameter : plain->parameters()) parameter.mutable_grad() = at::Tensor();
    };
    run("all trainable");
    chain.model->layers[1]->weight.set_requires_grad(false);
    plain->layers[1]->weight.set_requires_grad(false);
    rank.check(!sharded(chain.model->layers[1]->weight).requires_grad(), "the parameter is frozen at once");
    run("weight of layer1 frozen through the unsharded parameter");
    rank.check(!sharded(chain.model->layers[1]->weight).requires_grad(), "and stays so");
    sharded(chain.model->layers[0]->bias).set_requires_grad(false);
    plain->layers[0]->bias.set_requires_grad(false);
    rank.check(!chain.model->layers[0]->bias.requires_grad(), "the member is frozen at once");
    run("bias of layer0 frozen through the sharded parameter");
    sharded(chain.model->layers[1]->weight).set_requires_grad(true);
    plain->layers[1]->weight.set_requires_grad(true);
    chain.model->layers[0]->bias.set_requires_grad(true);
    plain->layers[0]->bias.set_requires_grad(true);
    rank.check(chain.model->layers[1]->weight.requires_grad(), "the member is thawed at once");
    rank.check(sharded(chain.model->layers[0]->bias).requires_grad(), "the parameter is thawed at once");
    run("both trainable again");
    for (auto& parameter : chain.model->layers[2]->parameters()) parameter.set_requires_grad(false);
    for (auto& parameter : plain->layers[2]->parameters()) parameter.set_requires_grad(false);
    run("a whole group frozen");
  });
}

/// Uses its weights by views first: no operator that reads them comes before.
struct ByViews : torch::nn::Module {
  ByViews() {
    for (int i = 0; i < 2; ++i) weights.push_back(register_parameter(fmt::format("w{}", i), torch::randn({4, 4})));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = x;
    for (auto& weight : weights) y = use == Use::kView ? torch::tanh(y.matmul(weight.t())) : y.matmul(weight.reshape({4, 4}));
    return y;
  }
  enum class Use { kView, kReshape } use = Use::kView;
  std::vector<at::Tensor> weights;
};

TEST_CASE("a view that begins a step sees that its parameter was frozen or thawed", "[runtime][requires_grad]") {
  for (const int ranks : {1, 2})
    for (const auto use : {ByViews::Use::kView, ByViews::Use::kReshape})
      CHECK(on_ranks(ranks, [use](Rank& rank) {
        auto make = [&] { return seeded(3, [&] { return std::make_shared<ByViews>(); }); };
        auto plain = make(), model = make();
        plain->use = model->use = use;
        fully_shard(*model, {.mesh = rank.mesh()});
        const auto x = torch::ones({2, 4}), y = torch::ones({2, 4}).requires_grad_();
        const auto check = [&](bool trainable, const std::string& what) {
          for (auto& weight : plain->weights) weight.set_requires_grad(trainable);
          for (auto* each : {model.get(), plain.get()}) {
            for (auto& parameter : each->parameters()) parameter.mutable_grad() = at::Tensor();
            each->forward(trainable ? x : y).sum().backward();
          }
          for (size_t i = 0; i < plain->weights.size(); ++i) {
            const auto expected = plain->weights[i].grad(), found = model->parameters()[i].grad();
            rank.check_close(found, expected.defined() ? rows_of(expected, rank.index(), rank.size()) : expected, what);
            rank.check_equal(model->weights[i].requires_grad(), trainable, what + ": on the unsharded parameter");
          }
        };
        check(true, "at first");
        for (auto& parameter : model->parameters()) parameter.set_requires_grad(false);
        check(false, "frozen by sharded parameter");
        for (auto& parameter : model->parameters()) parameter.set_requires_grad(true);
        check(true, "thawed by sharded parameter");
        for (auto& weight : model->weights) weight.set_requires_grad(false);
        check(false, "frozen by member");
        for (auto& weight : model->weights) weight.set_requires_grad(true);
        check(true, "thawed by member");
      }));
}

/// Operators whose other operand needs a gradient: of the parameters LibTorch asks no more then.
struct Behind : torch::nn::Module {
  Behind() {
    first = register_module("first", torch::nn::Linear(4, 6));
    conv = register_module("conv", torch::nn::Conv1d(torch::nn::Conv1dOptions(1, 1, 1)));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
    lstm = register_module("lstm", torch::nn::LSTM(6, 6));
    embedding = register_module("embedding", torch::nn::Embedding(3, 6));
    linear = register_module("linear", torch::nn::Linear(6, 6));
    square = register_parameter("square", torch::randn({6, 6}));
    gain = register_parameter("gain", torch::randn({6}));
    shift = register_parameter("shift", torch::randn({6}));
    head = register_module("head", torch::nn::Linear(6, 3));
  }
  at::Tensor forward(at::Tensor x) {
    x = conv->forward(torch::tanh(first->forward(x)).unsqueeze(1)).squeeze(1);
    x = std::get<0>(lstm->forward(norm->forward(x).unsqueeze(0))).squeeze(0);
    x = x * embedding->forward(torch::arange(x.size(0)).remainder(3));
    x = linear->forward(x).matmul(square) * gain + shift;
    return head->forward(torch::tanh(x));
  }
  torch::nn::Linear first{nullptr}, linear{nullptr}, head{nullptr};
  torch::nn::Conv1d conv{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::LSTM lstm{nullptr};
  torch::nn::Embedding embedding{nullptr};
  at::Tensor square, gain, shift;
};

std::vector<std::pair<std::string, at::Tensor>> members_of(Behind& model) {
  auto named = std::vector<std::pair<std::string, at::Tensor>>{{"square", model.square}, {"gain", model.gain}, {"shift", model.shift}};
  for (auto& parameter : model.named_parameters())
    if (parameter.key().find('.') != std::string::npos) named.emplace_back(parameter.key(), fsdp::unsharded(parameter.value()));
  return named;
}

TEST_CASE("what is thawed or frozen after a forward that has no backward, or between forward and backward, counts as in a plain module",
          "[runtime][requires_grad]") {
  enum class Toggled { kBefore, kAfterEvaluation, kBetween, kBehindForward };
  struct Row {
    bool by_member, is_frozen_first, shards_parts, reduces_unused;
    Toggled when;
    int ranks;
  };
  std::vector<Row> rows;
  for (const auto when : {Toggled::kBefore, Toggled::kAfterEvaluation, Toggled::kBetween, Toggled::kBehindForward})
    for (const bool is_frozen_first : {true, false})
      for (const int ranks : {1, 2}) {
        const bool is_odd = rows.size() % 2 == 1;
        // What is thawed behind a forward is unused in it.
        const bool reduces_unused = rows.size() % 3 == 0 && !(is_frozen_first && when == Toggled::kBehindForward);
        rows.push_back({is_odd != is_frozen_first, is_frozen_first, !is_odd, reduces_unused, when, ranks});
      }
  for (const auto& row : rows)
    CHECK(on_ranks(row.ranks, [&row](Rank& rank) {
      auto make = [] { return seeded(3, [] { return std::make_shared<Behind>(); }); };
      auto plain = make(), model = make();
      if (row.shards_parts)
        for (const auto& child : model->children()) fully_shard(*child, {.mesh = rank.mesh()});
      auto root = fully_shard(*model, {.mesh = rank.mesh()});
      root.set_reduce_scatter_unused_params(row.reduces_unused);
      const auto set = [&](bool is_trainable) {
        for (auto& parameter : plain->named_parameters())
          if (!parameter.key().starts_with("head")) parameter.value().set_requires_grad(is_trainable);
        for (auto& [name, member] : members_of(*model))
          if (!name.starts_with("head")) (row.by_member ? member : sharded(member)).set_requires_grad(is_trainable);
      };
      const auto x = torch::linspace(-1, 1, 24).view({6, 4});
      const auto step = [&](bool toggles_behind, const std::string& what) {
        for (auto* each : {plain.get(), model.get()})
          for (auto& parameter : each->parameters()) parameter.mutable_grad() = at::Tensor();
        auto expected = plain->forward(x).square().mean(), found = model->forward(x).square().mean();
        if (toggles_behind) set(row.is_frozen_first);
        rank.check_close(found.detach(), expected.detach(), what);
        expected.backward();
        found.backward();
        const auto registered = model->named_parameters();
        for (auto& parameter : plain->named_parameters()) {
          const auto& gradient = registered[parameter.key()].grad();
          const auto where = what + " of " + parameter.key();
          rank.check_equal(gradient.defined(), parameter.value().grad().defined(), where + " is there");
          if (gradient.defined()) rank.check_close(full_tensor(gradient), parameter.value().grad(), where, 1e-4);
        }
      };
      set(!row.is_frozen_first);
      step(false, "at first");
      if (row.when == Toggled::kBehindForward) return step(true, "toggled between forward and backward");
      if (row.when == Toggled::kBefore) set(row.is_frozen_first);
      for (int i = 0; i < 2; ++i) {
        model->forward(x);  // evaluated, with autograd on
        if (i == 0 && row.when == Toggled::kAfterEvaluation) set(row.is_frozen_first);
        if (i == 0 && row.when == Toggled::kBetween) set(row.is_frozen_first);
        if (i == 1 && row.when == Toggled::kBetween) set(!row.is_frozen_first);
      }
      step(false, "toggled around evaluations");
      step(false, "one step later");
    }));
}

TEST_CASE("a penalty on parameters that begins a step sees that they were thawed through members",
          "[runtime][requires_grad]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto model = plain_chain(1);
    fully_shard(model, {.mesh = rank.mesh()});
    auto& weight = model->layers[0]->weight;
    const auto step = [&](bool adds_penalty) {
      for (auto& parameter : model->parameters()) parameter.mutable_grad() = at::Tensor();
      const auto penalty = adds_penalty ? sharded(weight).square().sum() : torch::zeros({});
      (penalty + 0 * model->forward(torch::ones({2, 6})).sum()).backward();
    };
    weight.set_requires_grad(false);
    step(false);
    weight.set_requires_grad(true);
    step(true);
    rank.check_close(sharded(weight).grad(), 2 * sharded(weight).detach(), "the penalty's gradient");
  }));
}

TEST_CASE("a forward with everything frozen begins no step: what comes between steps may come",
          "[runtime][requires_grad]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    ShardedChain chain(rank.mesh());
    chain.step(rank.index());
    for (auto& parameter : chain.model->parameters()) parameter.set_requires_grad(false);
    const auto x = torch::ones({2, 6});
    rank.check_close(chain.model->forward(x), plain->forward(x).detach(), "the forward");
    { FullParameters scope(*chain.model, {.writeback = false}); }
    to(*chain.model, at::kDouble);
    plain->to(at::kDouble);
    rank.check_close(chain.model->forward(x.to(at::kDouble)), plain->forward(x.to(at::kDouble)).detach(), "in double");
    rank.check(local_shards(*chain.model).size() > 0, "local shards");
  }));
}

TEST_CASE("if both sides changed, the sharded parameter wins", "[runtime][requires_grad]") {
  on_ranks(2, [](Rank& rank) {
    auto model = plain_chain(1);
    model->head->bias.set_requires_grad(false);
    fully_shard(model, {.mesh = rank.mesh()});
    auto step = [&] {
      Inputs inputs(rank.index(), 0);
      model->forward(inputs.normal({2, 6})).sum().backward();
    };
    step();
    auto& handle = model->layers[0]->weight;
    sharded(handle).set_requires_grad(false);
    handle.set_requires_grad(false);
    handle.set_requires_grad(true);
    model->zero_grad();
    for (auto& parameter : model->parameters()) parameter.mutable_grad() = at::Tensor();
    step();
    rank.check(!handle.requires_grad() && !sharded(handle).grad().defined(), "frozen, as the sharded one says");
  });
}

TEST_CASE("a model with every parameter frozen runs forward and reduces nothing", "[runtime][requires_grad]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    auto model = plain_chain();
    for (auto& parameter : model->parameters()) parameter.set_requires_grad(false);
    for (auto& layer : model->layers) fully_shard(layer, {.mesh = rank.mesh()});
    fully_shard(model, {.mesh = rank.mesh()});
    Inputs inputs(rank.index(), 0);
    auto x = inputs.normal({2, 6}).requires_grad_(), y = x.detach().clone().requires_grad_();
    for (int step = 0; step < 3; ++step) {
      x.mutable_grad() = y.mutable_grad() = at::Tensor();
      model->forward(x).square().sum().backward();
      plain->forward(y).square().sum().backward();
      rank.check_close(x.grad(), y.grad(), "the input's gradient");
    }
    rank.check(rank.subjects_of("reduce_scatter").empty(), "no reduction");
  });
}

}  // namespace
}  // namespace fsdp::test
