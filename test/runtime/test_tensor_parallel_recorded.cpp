#include <catch2/catch.hpp>

#include "support/sample.hpp"
#include "support/tensor_parallel_model.hpp"

// What a program computes with the DTensors of tensor-parallel parameters while autograd records: a penalty, say, beside the
// loss.

namespace fsdp::test {
namespace {

using at::Tensor;
using Params = torch::OrderedDict<std::string, Tensor>;

struct Expression {
  std::string name;
  std::function<Tensor(const Params&)> of;
};
/// By names of TpNet; each gives a scalar.
const std::vector<Expression> kExpressions = {
    {"squares of all", [](const Params& p) {
       auto sum = torch::zeros({});
       for (const auto& item : p) sum = sum + item.value().square().sum();
       return sum;
     }},
    {"a norm of all", [](const Params& p) {
       std::vector<Tensor> flat;
       for (const auto& item : p) flat.push_back(item.value().reshape({-1}));
       return torch::cat(flat).norm();
     }},
    {"a product of two that are cut in other ways", [](const Params& p) {
       return torch::matmul(p["layers.0.down.weight"], p["layers.0.up.weight"]).square().mean();
     }},
    {"beside a whole tensor", [](const Params& p) {
       const auto& up = p["layers.0.up.weight"];
       return (up * torch::arange(up.numel()).reshape(up.sizes())).sum();
     }},
    {"views", [](const Params& p) {
       const auto& up = p["layers.1.up.weight"];
       return (up.t()[0] * up.select(1, 1)).sum() + up.narrow(0, 0, 1).sin().sum() + up.view({-1})[2].exp();
     }},
    {"one that is read twice", [](const Params& p) {
       const auto& down = p["layers.1.down.weight"];
       return (down.softmax(0) * down.cumsum(1)).sum();
     }},
    {"a scalar and one that is the same on all ranks", [](const Params& p) {
       return (p["scale"] * p["layers.0.bias"]).pow(3).sum() + p["scale"].exp() + p["layers.0.norm.weight"].prod();
     }},
    {"a list of parameters", [](const Params& p) {
       return torch::stack({p["layers.0.up.weight"], p["layers.1.up.weight"]}).var();
     }},
};

void computes_like_plain(Rank& rank, const TpCase& c, const Expression& expression) {
  TpModel tp(rank, c);
  tp.shard(c);
  const auto expected = tp.plain->named_parameters();
  for (int step = 0; step < 2; ++step)
    for (const bool has_loss : {false, true}) {
      const auto what = fmt::format("{}: {}{}: ", c.text(), expression.name, has_loss ? " and the loss" : "");
      tp.model->zero_grad();
      tp.plain->zero_grad();
      if (has_loss) plain_backward(tp.plain, c.data_parallel(), step);
      const auto wanted = expression.of(expected);
      wanted.backward();
      const auto found = expression.of(tp.model->named_parameters());
      rank.check_close(found.detach(), wanted.detach(), what + "value");
      const auto all = has_loss ? tp.model->loss(tp.batch, step) + found : found;
      all.backward();
      for (const auto& param : tp.model->named_parameters()) {
        const auto wanted_grad = expected[param.key()].grad();
        const auto grad = param.value().grad();
        rank.check_equal(grad.defined(), wanted_grad.defined(), what + "gradient of " + param.key());
        if (!grad.defined()) continue;
        rank.check(is_dtensor(grad) && grad.sizes() == param.value().sizes(), what + "placed as the parameter: " + param.key());
        rank.check_close(full_grad(param.value()), wanted_grad, what + "gradient of " + param.key());
      }
    }
}

TEST_CASE("what autograd records of a tensor-parallel parameter's DTensor is computed with the whole",
          "[runtime][tensor_parallel_recorded]") {
  Sample sample(3);
  for (const auto& shape : std::vector<std::vector<int64_t>>{{2, 2}, {1, 2}, {2, 1}, {3, 2}, {2, 2, 2}})
    for (const int64_t hidden : {8, 5, 1})  // the last: nothing on some tensor-parallel ranks
      for (const auto& expression : kExpressions) {
        if (!sample.takes_next()) continue;
        const TpCase c{.shape = shape, .hidden = hidden};
        INFO(expression.name);
        CHECK(on_ranks(c.ranks(), [&](Rank& rank) { computes_like_plain(rank, c, expression); }));
      }
}

TEST_CASE("so it is with other cuts, and with parameters that are replicated", "[runtime][tensor_parallel_recorded]") {
  Sample sample(2);
  for (const auto& expression : kExpressions) {
    INFO(expression.name);
    for (const TpCase& c :
         {TpCase{.shape = {2, 2}, .says = Says::kMesh}, TpCase{.shape = {2, 2}, .dim = 1},
          TpCase{.shape = {2, 2}, .replicates_some = true}, TpCase{.shape = {2, 2}, .hidden = 7, .reshard = true}})
      if (sample.takes_next()) CHECK(on_ranks(c.ranks(), [&](Rank& rank) { computes_like_plain(rank, c, expression); }));
  }
}

TEST_CASE("second derivatives, and gradients that are asked for, of tensor-parallel parameters",
          "[runtime][tensor_parallel_recorded]") {
  for (const int64_t hidden : {8, 5})
    CHECK(on_ranks(4, [=](Rank& rank) {
      const TpCase c{.shape = {2, 2}, .hidden = hidden};
      TpModel tp(rank, c);
      tp.shard(c);
      const auto penalty = [](const Params& params) {
        const auto value = params["layers.0.up.weight"].sin().sum() * params["layers.0.down.weight"].square().sum();
        const auto first = torch::autograd::grad({value}, {params["layers.0.up.weight"]}, {}, true, /*create_graph=*/true)[0];
        return std::pair(value, first);
      };
      const auto [wanted, wanted_first] = penalty(tp.plain->named_parameters());
      const auto [found, found_first] = penalty(tp.model->named_parameters());
      rank.check_close(found.detach(), wanted.detach(), "value");
      rank.check_close(found_first.detach(), wanted_first.detach(), "first derivative");
      wanted_first.square().sum().backward();
      found_first.square().sum().backward();
      const auto expected = tp.plain->named_parameters();
      for (const auto& param : tp.model->named_parameters())
        rank.check_close(full_grad(param.value()), expected[param.key()].grad(), "second derivative by " + param.key());
      // Without a history gradients are sharded.
      const auto up = tp.model->named_parameters()["layers.0.up.weight"];
      const auto asked = torch::autograd::grad({up.sin().sum()}, {up})[0];
      rank.check_close(DTensor(asked).full_tensor(), expected["layers.0.up.weight"].detach().cos(), "asked for");
    }));
}

TEST_CASE("a frozen tensor-parallel parameter is computed with and gets no gradient", "[runtime][tensor_parallel_recorded]") {
  CHECK(on_ranks(4, [](Rank& rank) {
    const TpCase c{.shape = {2, 2}, .hidden = 5};
    TpModel tp(rank, c);
    tp.shard(c);
    for (auto& module : {tp.model, tp.plain}) module->named_parameters()["layers.0.up.weight"].set_requires_grad(false);
    for (const auto& expression : kExpressions) {
      tp.model->zero_grad();
      tp.plain->zero_grad();
      const auto wanted = expression.of(tp.plain->named_parameters()), found = expression.of(tp.model->named_parameters());
      rank.check_close(found.detach(), wanted.detach(), expression.name);
      if (!wanted.requires_grad()) continue;
      wanted.backward();
      found.backward();
      const auto expected = tp.plain->named_parameters();
      for (const auto& param : tp.model->named_parameters())
        rank.check_close(full_grad(param.value()), expected[param.key()].grad(), expression.name + ": " + param.key());
    }
  }));
}

TEST_CASE("a write to a tensor-parallel parameter that would be lost is refused", "[runtime][tensor_parallel_recorded]") {
  CHECK(on_ranks(4, [](Rank& rank) {
    const TpCase c{.shape = {2, 2}};
    TpModel tp(rank, c);
    const auto root = tp.shard(c);
    const auto up = tp.model->named_parameters()["layers.0.up.weight"];
    const auto before = full_tensor(up).clone();
    rank.check_throws<c10::Error>([&] { up.mul_(2); }, {"in-place"}, "recorded");
    rank.check_identical(full_tensor(up), before, "nothing was written");
    {
      const ForwardScope scope(root);
      const torch::NoGradGuard no_grad;
      rank.check_throws<UsageError>([&] { up.mul_(2); }, {"layers.0.up.weight", "aten::mul_"}, "in forward");
    }
    rank.check_identical(full_tensor(up), before, "nor in forward");
    const torch::NoGradGuard no_grad;
    up.mul_(2);
    rank.check_identical(full_tensor(up), before * 2, "behind forward it is");
  }));
}

}  // namespace
}  // namespace fsdp::test
