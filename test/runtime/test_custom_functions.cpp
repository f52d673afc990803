#include <catch2/catch.hpp>

#include <map>

#include "support/ranks.hpp"

// What consumes a parameter without being an operator: a torch::autograd::Function of a user's, on members and on parameters().

namespace fsdp::test::custom_functions {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// x @ w.t(), as a fused kernel has it.
struct Times : torch::autograd::Function<Times> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& w) {
    context->save_for_backward({x, w});
    return x.matmul(w.t());
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0].matmul(saved[1]), gradients[0].t().matmul(saved[0])};
  }
};

/// Of one tensor, with a gradient that passes straight through.
struct Rounded : torch::autograd::Function<Rounded> {
  static Tensor forward(AutogradContext*, const Tensor& w) { return (w * 8).round() / 8; }
  static variable_list backward(AutogradContext*, variable_list gradients) { return {gradients[0]}; }
};

/// x * w + b, where w and b may have x's sizes.
struct Scaled : torch::autograd::Function<Scaled> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& w, const Tensor& b) {
    context->save_for_backward({x, w});
    auto result = torch::empty_like(x);
    result.copy_(x * w.detach());
    return result.add_(b.data());
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * saved[1], gradients[0] * saved[0], gradients[0] + torch::zeros_like(saved[1])};
  }
};

/// A sum of several products, with the weights in a list.
struct SumOfProducts : torch::autograd::Function<SumOfProducts> {
  static Tensor forward(AutogradContext* context, const Tensor& x, torch::TensorList weights) {
    variable_list saved{x};
    saved.insert(saved.end(), weights.begin(), weights.end());
    context->save_for_backward(saved);
    auto sum = Rounded::apply(weights[0]).sum();
    for (const auto& weight : weights) sum = sum + x.flatten()[0] * weight.pow(2).sum();
    return sum;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    variable_list all{Tensor()};
    for (size_t i = 1; i < saved.size(); ++i) all.push_back(gradients[0] * 2 * saved[0].flatten()[0] * saved[i]);
    all[1] = all[1] + gradients[0];
    return all;
  }
};

/// What it was given, or a view of that.
struct Handed : torch::autograd::Function<Handed> {
  static Tensor forward(AutogradContext* context, const Tensor& w, bool is_view) {
    context->saved_data["is_view"] = is_view;
    context->saved_data["rows"] = w.size(0);
    return is_view ? w.narrow(0, 1, 2) : w;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    if (!context->saved_data["is_view"].toBool()) return {gradients[0], Tensor()};
    auto sizes = gradients[0].sizes().vec();
    sizes[0] = context->saved_data["rows"].toInt();
    auto all = torch::zeros(sizes);
    all.narrow(0, 1, 2).copy_(gradients[0]);
    return {all, Tensor()};
  }
};

/// Runs its part again in backward, as a checkpoint of a user's.
struct Again : torch::autograd::Function<Again> {
  static Tensor run(const Tensor& x, const Tensor& w) { return (x.matmul(w.t()) + w.sum()).tanh() + (x * w[0]).sum(); }
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& w) {
    context->save_for_backward({x, w});
    return run(x, w);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const torch::AutoGradMode records(true);
    const auto saved = context->get_saved_variables();
    const auto x = saved[0].detach(), w = saved[1].detach().requires_grad_();
    const auto result = run(x, w);
    torch::autograd::backward({result}, {gradients[0]});
    return {Tensor(), w.grad()};
  }
};

torch::nn::Sequential make_net() {
  return seeded(3, [] { return torch::nn::Sequential(torch::nn::Linear(4, 6), torch::nn::Tanh(), torch::nn::Linear(6, 4)); });
}

using Weights = std::map<std::string, Tensor>;
Weights members(torch::nn::Sequential& net) {
  const auto& first = *net->ptr<torch::nn::LinearImpl>(0);
  const auto& last = *net->ptr<torch::nn::LinearImpl>(2);
  return {{"0.weight", first.weight}, {"0.bias", first.bias}, {"2.weight", last.weight}, {"2.bias", last.bias}};
}
Weights registered(torch::nn::Sequential& net) {
  Weights all;
  for (const auto& parameter : net->named_parameters()) all[parameter.key()] = parameter.value();
  return all;
}

using Loss = std::function<Tensor(torch::nn::Sequential&, Weights&, const Tensor&)>;

Tensor mean_of(const Tensor& result) { return result.pow(2).mean(); }

/// x: (3, 4).
const std::map<std::string, Loss>& losses() {
  static const std::map<std::string, Loss> all = {
      {"one", [](auto&, auto& w, auto& x) { return mean_of(Times::apply(x, w["0.weight"])); }},
      {"behind forward", [](auto& net, auto& w, auto& x) { return mean_of(Times::apply(net->forward(x), w["0.weight"])); }},
      {"in front of forward",
       [](auto& net, auto& w, auto& x) { return mean_of(net->forward(Times::apply(Times::apply(x, w["0.weight"]), w["2.weight"]))); }},
      {"and an operator",
       [](auto&, auto& w, auto& x) { return mean_of(Times::apply(x, w["0.weight"]) + x.matmul(w["0.weight"].t())); }},
      {"and a use by forward", [](auto& net, auto& w, auto& x) { return mean_of(net->forward(x)) + mean_of(Times::apply(x, w["0.weight"])); }},
      {"a view", [](auto&, auto& w, auto& x) { return mean_of(Times::apply(x, w["0.weight"].narrow(0, 1, 3))); }},
      {"rounded", [](auto&, auto& w, auto& x) { return mean_of(x.matmul(Rounded::apply(w["0.weight"]).t())); }},
      {"rounded, alone", [](auto& net, auto& w, auto& x) { return Rounded::apply(w["0.weight"]).pow(2).sum() + net->forward(x).mean(); }},
      {"two", [](auto&, auto& w, auto& x) { return mean_of(Times::apply(Times::apply(x, Rounded::apply(w["0.weight"])), w["2.weight"])); }},
      {"twice", [](auto&, auto& w, auto& x) { return mean_of(Times::apply(x, w["0.weight"])) * Times::apply(x + 1, w["0.weight"]).mean(); }},
      {"of x's sizes", [](auto&, auto& w, auto& x) { return mean_of(Scaled::apply(x[0], w["2.bias"], w["2.bias"])); }},
      {"of x's sizes, beside others", [](auto&, auto& w, auto& x) { return mean_of(Scaled::apply(x, w["2.bias"], w["0.weight"][0])); }},
      {"a list", [](auto&, auto& w, auto& x) {
         const variable_list weights{w["0.weight"], w["2.bias"], w["2.weight"]};
         return SumOfProducts::apply(x, torch::TensorList(weights));
       }},
      {"its input", [](auto&, auto& w, auto& x) { return mean_of(x.matmul(Handed::apply(w["0.weight"], false).t())); }},
      {"a view of its input", [](auto&, auto& w, auto& x) { return mean_of(x.matmul(Handed::apply(w["0.weight"], true).t())); }},
      {"a checkpoint", [](auto&, auto& w, auto& x) { return mean_of(Again::apply(x, w["0.weight"])); }},
      {"detached beside it",
       [](auto&, auto& w, auto& x) { return mean_of(Scaled::apply(x[1], w["2.bias"].detach(), w["2.bias"])); }},
  };
  return all;
}

Tensor batch(int of, int step) { return torch::sin(torch::arange(12.0).view({3, 4}) * (of + 1) + step); }

struct Case {
  std::function<void(torch::nn::Sequential&, Rank&)> shard;
  Loss loss;
  bool on_members = false;
  int backwards = 1;
  std::string frozen = {};
};

/// Three steps by hand, beside the plain module on all ranks' batches.
void trains_the_same(Rank& rank, const Case& given) {
  auto plain = make_net(), sharded = make_net();
  given.shard(sharded, rank);
  for (auto* net : {&plain, &sharded})
    if (!given.frozen.empty()) (*net)->named_parameters()[given.frozen].set_requires_grad(false);
  for (int step = 0; step < 3; ++step) {
    for (auto* net : {&plain, &sharded}) (*net)->zero_grad();
    for (int backward = 0; backward < given.backwards; ++backward) {
      Tensor sum = torch::zeros({});
      auto plain_weights = members(plain);
      for (int of = 0; of < rank.size(); ++of) sum = sum + given.loss(plain, plain_weights, batch(of, step + backward));
      (sum / rank.size()).backward();
      auto weights = given.on_members ? members(sharded) : registered(sharded);
      given.loss(sharded, weights, batch(rank.index(), step + backward)).backward();
    }
    const auto expected = plain->named_parameters();
    for (const auto& found : sharded->named_parameters()) {
      const auto& gradient = expected[found.key()].grad();
      rank.check_equal(found.value().grad().defined(), gradient.defined(), found.key() + " has a gradient");
      if (gradient.defined()) rank.check_close(full_tensor(found.value().grad()), gradient, found.key());
    }
    const torch::NoGradGuard no_grad;
    for (auto* net : {&plain, &sharded})
      for (auto& parameter : (*net)->parameters())
        if (parameter.grad().defined()) parameter.sub_(parameter.grad(), 0.1);
    for (const auto& parameter : sharded->parameters())
      rank.check(is_dtensor(torch::zeros_like(parameter)), "behind the function, an optimizer's state is a DTensor");
  }
}

void shard_layers(torch::nn::Sequential& net, const DeviceMesh& mesh) {
  fully_shard(*net->ptr(0), {.mesh = mesh});
  fully_shard(*net, {.mesh = mesh});
}
const auto on_its_mesh = [](torch::nn::Sequential& net, Rank& rank) { shard_layers(net, rank.mesh()); };

}  // namespace

TEST_CASE("a function of a user's on parameters brings them the mean of the ranks' gradients", "[runtime][custom_functions]") {
  const bool on_members = GENERATE(true, false);
  CAPTURE(on_members);
  for (const auto& [which, loss] : losses()) {
    CAPTURE(which);
    for (const int world_size : {1, 2, 4})  // 6 rows over 4 ranks are uneven
      on_ranks(world_size, [&, &loss = loss](Rank& rank) {
        trains_the_same(rank, {.shard = on_its_mesh, .loss = loss, .on_members = on_members});
      });
  }
}

TEST_CASE("a function on entries of parameters() trains them on two dimensions of ranks, in several backwards, and beside frozen ones",
          "[runtime][custom_functions]") {
  for (const auto* which : {"one", "two", "a list", "of x's sizes", "and a use by forward"}) {
    CAPTURE(which);
    const auto& loss = losses().at(which);
    on_ranks(4, [&](Rank& rank) {
      const auto on_two = [](torch::nn::Sequential& net, Rank& rank) { shard_layers(net, rank.hybrid(2, 2)); };
      trains_the_same(rank, {.shard = on_two, .loss = loss});
    });
    on_ranks(2, [&](Rank& rank) {
      const auto keeps = [](torch::nn::Sequential& net, Rank& rank) { fully_shard(*net, {.mesh = rank.mesh(), .reshard_after_forward = false}); };
      trains_the_same(rank, {.shard = keeps, .loss = loss, .backwards = 2});
      trains_the_same(rank, {.shard = on_its_mesh, .loss = loss, .backwards = 3, .frozen = "2.weight"});
    });
  }
}

TEST_CASE("torch::autograd::grad of a function on entries of parameters() gives the mean of the ranks' gradients",
          "[runtime][custom_functions]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = make_net(), sharded = make_net();
    on_its_mesh(sharded, rank);
    for (const auto& [which, loss] : losses()) {
      Tensor sum = torch::zeros({});
      auto plain_weights = members(plain), weights = registered(sharded);
      for (int of = 0; of < rank.size(); ++of) sum = sum + loss(plain, plain_weights, batch(of, 0)) / rank.size();
      const auto expected = torch::autograd::grad({sum}, plain->parameters(), {}, false, false, /*allow_unused=*/true);
      const auto found = torch::autograd::grad({loss(sharded, weights, batch(rank.index(), 0))}, sharded->parameters(), {}, false,
                                               false, /*allow_unused=*/true);
      for (size_t i = 0; i < expected.size(); ++i) {
        rank.check_equal(found[i].defined(), expected[i].defined(), which + " has a gradient");
        if (expected[i].defined() && found[i].defined()) rank.check_close(full_tensor(found[i]), expected[i], which);
      }
    }
    const torch::NoGradGuard no_grad;
    rank.check(is_dtensor(torch::zeros_like(sharded->parameters()[0])), "no function is under way");
  });
}

namespace {

struct Throwing : torch::autograd::Function<Throwing> {
  static Tensor forward(AutogradContext*, const Tensor& w) { throw std::runtime_error(c10::str("of sizes ", w.sizes())); }
  static variable_list backward(AutogradContext*, variable_list gradients) { return gradients; }
};

/// With something of the optimizer's, a DTensor, in its gradient.
struct Decayed : torch::autograd::Function<Decayed> {
  static Tensor forward(AutogradContext* context, const Tensor& w, const Tensor& state) {
    context->saved_data["state"] = state;
    return w.sum();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {gradients[0] * context->saved_data["state"].toTensor(), Tensor()};
  }
};

}  // namespace

TEST_CASE("a function that throws, or brings a DTensor for a gradient, leaves nothing behind", "[runtime][custom_functions]") {
  on_ranks(2, [](Rank& rank) {
    auto net = make_net();
    on_its_mesh(net, rank);
    const auto weight = net->parameters()[0];
    rank.check_throws<std::runtime_error>([&] { Throwing::apply(weight); }, {"[6, 4]"}, "its own error");
    net->forward(batch(rank.index(), 0)).mean().backward();
    Tensor state;
    {
      const torch::NoGradGuard no_grad;
      state = torch::ones_like(weight);
    }
    rank.check(is_dtensor(state), "behind it, state is a DTensor");
    net->zero_grad();
    rank.check_throws<UsageError>([&] { Decayed::apply(weight, state).backward(); }, {"0.weight", "DTensor", "full_tensor"},
                                  "a gradient that is a DTensor");
    net->forward(batch(rank.index(), 0)).mean().backward();
    rank.check(weight.grad().defined(), "and the next step is done");
  });
}

TEST_CASE("the gradient of to_local of an entry of parameters() is its own, beside what forward leads to it",
          "[runtime][custom_functions]") {
  for (const bool is_beside : {false, true})
    on_ranks(2, [&](Rank& rank) {
      auto plain = make_net(), sharded = make_net();
      on_its_mesh(sharded, rank);
      const auto penalty = plain->named_parameters()["0.weight"].pow(2).sum();
      auto loss = DTensor(sharded->named_parameters()["0.weight"]).to_local().pow(2).sum();
      auto expected = penalty;
      if (is_beside) {
        for (int of = 0; of < rank.size(); ++of) expected = expected + plain->forward(batch(of, 0)).pow(2).mean() / rank.size();
        loss = loss + sharded->forward(batch(rank.index(), 0)).pow(2).mean();
      }
      expected.backward();
      loss.backward();
      rank.check_close(full_tensor(sharded->named_parameters()["0.weight"].grad()), plain->named_parameters()["0.weight"].grad(), "weight");
    });
}

}  // namespace fsdp::test::custom_functions
