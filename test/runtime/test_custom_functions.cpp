#include <catch2/catch.hpp>

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

torch::nn::Sequential make_net() {
  return seeded(3, [] { return torch::nn::Sequential(torch::nn::Linear(4, 6), torch::nn::Tanh(), torch::nn::Linear(6, 4)); });
}

struct Weights {
  Tensor first, last;
};
Weights members(torch::nn::Sequential& net) {
  return {net->ptr<torch::nn::LinearImpl>(0)->weight, net->ptr<torch::nn::LinearImpl>(2)->weight};
}
Weights registered(torch::nn::Sequential& net) { return {net->named_parameters()["0.weight"], net->named_parameters()["2.weight"]}; }

Tensor loss_of(const std::string& which, torch::nn::Sequential& net, const Weights& weights, const Tensor& x) {
  if (which == "one") return Times::apply(x, weights.first).pow(2).mean();
  if (which == "behind forward") return Times::apply(net->forward(x), weights.first).pow(2).mean();
  if (which == "and an operator") return (Times::apply(x, weights.first) + x.matmul(weights.first.t())).pow(2).mean();
  if (which == "a view") return Times::apply(x, weights.first.narrow(0, 1, 3)).pow(2).mean();
  if (which == "rounded") return x.matmul(Rounded::apply(weights.first).t()).pow(2).mean();
  if (which == "rounded, alone") return Rounded::apply(weights.first).pow(2).sum() + net->forward(x).mean();
  return Times::apply(Times::apply(x, Rounded::apply(weights.first)), weights.last).pow(2).mean();
}

}  // namespace

TEST_CASE("a function of a user's on parameters brings them the mean of the ranks' gradients", "[runtime][custom_functions]") {
  const bool on_members = GENERATE(true, false);
  const auto which = GENERATE(as<std::string>(), "one", "behind forward", "and an operator", "a view", "rounded", "rounded, alone",
                              "two");
  // Without an ordinary operator on the entry of parameters() in between, its own gradient comes as a DTensor.
  const bool is_of_entry_alone = which == "one" || which == "two" || which.starts_with("rounded");
  if (!on_members && is_of_entry_alone) return;
  CAPTURE(on_members, which);
  for (const int world_size : {1, 2})
    on_ranks(world_size, [&](Rank& rank) {
      auto plain = make_net(), sharded = make_net();
      fully_shard(*sharded->ptr(0), {.mesh = rank.mesh()});
      fully_shard(*sharded, {.mesh = rank.mesh()});
      const auto batch = [](int of, int step) { return torch::sin(torch::arange(12.0).view({3, 4}) * (of + 1) + step); };
      for (int step = 0; step < 3; ++step) {
        for (auto* net : {&plain, &sharded}) (*net)->zero_grad();
        Tensor sum = torch::zeros({});
        for (int of = 0; of < world_size; ++of) sum = sum + loss_of(which, plain, members(plain), batch(of, step));
        (sum / world_size).backward();
        const auto weights = on_members ? members(sharded) : registered(sharded);
        loss_of(which, sharded, weights, batch(rank.index(), step)).backward();
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
      }
    });
}

}  // namespace fsdp::test::custom_functions
