#include <catch2/catch.hpp>

#include "support/models.hpp"

// The dtype that a gradient arrives in, is reduced in and is kept in: mixed operands, and
// LibTorch's grad_dtype.

namespace fsdp::test {
namespace {

/// A weight that meets its input element by element: where their dtypes differ, autograd makes the
/// weight's gradient in the larger one.
struct ElementwiseImpl : torch::nn::Module {
  explicit ElementwiseImpl(int64_t width = 6, at::ScalarType dtype = at::kFloat)
      : weight(register_parameter("weight", torch::ones({width}, dtype))) {}
  at::Tensor forward(const at::Tensor& x) { return x * weight; }
  at::Tensor weight;
};
TORCH_MODULE(Elementwise);

/// Of the weight of a Elementwise under `forward(x).sum()`: the sum of x over its rows.
at::Tensor activations_of(int rank, int step = 0) { return Inputs(rank, step).normal({5, 6}); }

at::Tensor average_gradient(int ranks, int step = 0) {
  at::Tensor sum = torch::zeros({6}, at::kDouble);
  for (int rank = 0; rank < ranks; ++rank) sum += activations_of(rank, step).sum(0).to(at::kDouble);
  return sum / ranks;
}

void check_scalar_type(const Rank& rank, const at::Tensor& tensor, at::ScalarType expected,
                       const std::string& what) {
  rank.check_equal(
      std::string(tensor.defined() ? c10::toString(tensor.scalar_type()) : "undefined"),
      std::string(c10::toString(expected)), what);
}

const MixedPrecisionPolicy kLowPolicy{
    .param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat, .cast_forward_inputs = false};

/// Two parameters of one group.
struct TwoElementwiseImpl : torch::nn::Module {
  explicit TwoElementwiseImpl(at::ScalarType dtype = at::kFloat)
      : first(register_module("first", Elementwise(6, dtype))),
        second(register_module("second", Elementwise(6, dtype))) {}
  at::Tensor forward(const at::Tensor& x) { return first->forward(x) + second->forward(x); }
  Elementwise first, second;
};
TORCH_MODULE(TwoElementwise);

}  // namespace

TEST_CASE(
    "a float32 gradient of a parameter that is computed in bfloat16 is reduced in float32 as it is",
    "[runtime][gradient_dtypes]") {
  for (const int ranks : {1, 2, 3}) {
    CAPTURE(ranks);
    CHECK(on_ranks(ranks, [&](Rank& rank) {
      Elementwise model;
      fully_shard(model, {.mesh = rank.mesh(), .mp_policy = kLowPolicy});
      model->forward(activations_of(rank.index())).sum().backward();
      const auto gradient = model->parameters()[0].grad();
      check_scalar_type(rank, gradient, at::kFloat, "the gradient's dtype");
      rank.check_close(gradient,
                       rows_of(average_gradient(ranks).to(at::kFloat), rank.index(), ranks),
                       "the gradient", 1e-6);
    }));
  }
}

TEST_CASE("float32 gradients of backwards without reduction add up in float32 too",
          "[runtime][gradient_dtypes]") {
  CHECK(on_ranks(2, [&](Rank& rank) {
    Elementwise model;
    auto root = fully_shard(model, {.mesh = rank.mesh(), .mp_policy = kLowPolicy});
    root.set_requires_gradient_sync(false);
    model->forward(activations_of(rank.index(), 0)).sum().backward();
    model->forward(activations_of(rank.index(), 1)).sum().backward();
    root.set_requires_gradient_sync(true);
    model->forward(activations_of(rank.index(), 2)).sum().backward();
    const auto expected = average_gradient(2, 0) + average_gradient(2, 1) + average_gradient(2, 2);
    rank.check_close(model->parameters()[0].grad(),
                     rows_of(expected.to(at::kFloat), rank.index(), 2), "the gradient", 1e-6);
  }));
}

TEST_CASE(
    "a gradient has the grad_dtype that its parameter had before fully_shard, after fsdp::to as "
    "well",
    "[runtime][gradient_dtypes]") {
  for (const int ranks : {1, 2}) {
    CAPTURE(ranks);
    CHECK(on_ranks(ranks, [&](Rank& rank) {
      Elementwise model(6, at::kFloat);
      model->weight.set_grad_dtype(at::kFloat);
      fully_shard(model, {.mesh = rank.mesh()});
      fsdp::to(*model, at::kBFloat16);
      const auto parameter = model->parameters()[0];
      model->forward(activations_of(rank.index())).sum().backward();
      check_scalar_type(rank, parameter, at::kBFloat16, "the parameter");
      check_scalar_type(rank, parameter.grad(), at::kFloat, "its gradient");
      rank.check_close(parameter.grad(),
                       rows_of(average_gradient(ranks).to(at::kFloat), rank.index(), ranks),
                       "the gradient", 1e-6);
      fsdp::to(*model, at::kDouble);
      check_scalar_type(rank, parameter.grad(), at::kFloat,
                        "a gradient that was there when the parameter became double");
    }));
  }
}

TEST_CASE(
    "a grad_dtype other than the parameter's is what its gradient is reduced and kept in, "
    "parameter by parameter",
    "[runtime][gradient_dtypes]") {
  CHECK(on_ranks(3, [&](Rank& rank) {
    TwoElementwise model(at::kBFloat16);
    model->first->weight.set_grad_dtype(at::kFloat);
    fully_shard(model, {.mesh = rank.mesh()});
    model->forward(activations_of(rank.index())).sum().backward();
    const auto of_first = model->first->parameters()[0].grad(),
               of_second = model->second->parameters()[0].grad();
    check_scalar_type(rank, of_first, at::kFloat, "of the parameter with a grad_dtype");
    check_scalar_type(rank, of_second, at::kBFloat16, "of the other");
    const auto expected = rows_of(average_gradient(3).to(at::kFloat), rank.index(), 3);
    rank.check_close(of_first, expected, "in float32", 1e-6);
    rank.check_close(of_second.to(at::kFloat), expected, "in bfloat16", 3e-2);
    rank.check_equal(rank.subjects_of("reduce_scatter").size(), size_t{2},
                     "reductions: one for each dtype");
  }));
}

TEST_CASE("a grad_dtype smaller than the parameter's is what gradients are cast to",
          "[runtime][gradient_dtypes]") {
  CHECK(on_ranks(2, [&](Rank& rank) {
    Elementwise model;
    model->weight.set_grad_dtype(at::kBFloat16);
    fully_shard(model, {.mesh = rank.mesh()});
    model->forward(activations_of(rank.index())).sum().backward();
    const auto gradient = model->parameters()[0].grad();
    check_scalar_type(rank, gradient, at::kBFloat16, "the gradient");
    rank.check_close(gradient.to(at::kFloat),
                     rows_of(average_gradient(2).to(at::kFloat), rank.index(), 2), "rounded", 2e-2);
  }));
}

TEST_CASE("a grad_dtype that changes counts from the next step on, whichever side it was set on",
          "[runtime][gradient_dtypes]") {
  CHECK(on_ranks(2, [&](Rank& rank) {
    Elementwise model(6, at::kBFloat16);
    fully_shard(model, {.mesh = rank.mesh()});
    const auto parameter = model->parameters()[0];
    const auto step = [&](at::ScalarType expected, const std::string& what) {
      parameter.mutable_grad() = at::Tensor();
      model->forward(activations_of(rank.index())).sum().backward();
      check_scalar_type(rank, parameter.grad(), expected, what);
    };
    parameter.set_grad_dtype(at::kFloat);  // before the first forward
    step(at::kFloat, "set on the sharded parameter");
    rank.check_close(parameter.grad(), rows_of(average_gradient(2).to(at::kFloat), rank.index(), 2),
                     "float32", 1e-6);
    parameter.mutable_grad() = at::Tensor();
    model->weight.set_grad_dtype(at::kBFloat16);
    step(at::kBFloat16, "set on the module's own member");
    rank.check(parameter.grad_dtype() == at::kBFloat16, "the sharded parameter followed");
    parameter.mutable_grad() = at::Tensor();
    parameter.set_grad_dtype(at::kDouble);
    step(at::kDouble, "changed again");
  }));
}

TEST_CASE("a grad_dtype of none takes gradients as autograd makes them",
          "[runtime][gradient_dtypes]") {
  CHECK(on_ranks(2, [&](Rank& rank) {
    Elementwise model(6, at::kBFloat16);
    model->weight.set_grad_dtype(std::nullopt);
    auto root = fully_shard(model, {.mesh = rank.mesh()});
    const auto parameter = model->parameters()[0];
    model->forward(activations_of(rank.index())).sum().backward();
    check_scalar_type(rank, parameter.grad(), at::kFloat, "of a float32 input");
    rank.check_close(parameter.grad(), rows_of(average_gradient(2).to(at::kFloat), rank.index(), 2),
                     "float32", 1e-6);
    parameter.mutable_grad() = at::Tensor();
    model->forward(activations_of(rank.index()).to(at::kBFloat16)).sum().backward();
    check_scalar_type(rank, parameter.grad(), at::kBFloat16, "of a bfloat16 input");
    root.set_reduce_scatter_unused_params(true);
    rank.check_throws<UsageError>(
        [&] { model->forward(activations_of(rank.index())).sum().backward(); },
        {"weight", "grad_dtype", "reduce_dtype"}, "with unused parameters reduced");
  }));
}

TEST_CASE("a grad_dtype of none counts on the module's own member whatever was set before",
          "[runtime][gradient_dtypes]") {
  CHECK(on_ranks(2, [&](Rank& rank) {
    Elementwise model(6, at::kBFloat16);
    fully_shard(model, {.mesh = rank.mesh()});
    const auto parameter = model->parameters()[0];
    const auto step = [&](std::optional<at::ScalarType> asked, at::ScalarType expected) {
      parameter.mutable_grad() = at::Tensor();
      model->weight.set_grad_dtype(asked);
      model->forward(activations_of(rank.index()).to(at::kBFloat16)).sum().backward();
      check_scalar_type(rank, parameter.grad(), expected, asked ? c10::toString(*asked) : "none");
    };
    step(at::kFloat, at::kFloat);  // so gradients reach the unsharded parameter as they are made
    step(std::nullopt, at::kBFloat16);
    step(at::kDouble, at::kDouble);
    step(std::nullopt, at::kBFloat16);
    step(at::kBFloat16, at::kBFloat16);
  }));
}

TEST_CASE("a grad_dtype set on the module's own member counts, though a thawed parameter is seen before the step begins",
          "[runtime][gradient_dtypes]") {
  CHECK(on_ranks(2, [&](Rank& rank) {
    Elementwise model;
    model->weight.set_requires_grad(false);
    fully_shard(model, {.mesh = rank.mesh()});
    model->weight.set_requires_grad(true);
    model->weight.set_grad_dtype(at::kDouble);
    const auto view = model->weight.view({1, 6});  // reads nothing, so no step begins with it
    (activations_of(rank.index()) * view).sum().backward();
    check_scalar_type(rank, model->parameters()[0].grad(), at::kDouble, "the gradient");
  }));
}

TEST_CASE("a grad_dtype set behind a recorded forward that has no backward counts in the next one",
          "[runtime][gradient_dtypes]") {
  CHECK(on_ranks(2, [&](Rank& rank) {
    for (const bool by_member : {true, false}) {
      Elementwise model;
      fully_shard(model, {.mesh = rank.mesh()});
      const auto loss = [&] { return model->forward(activations_of(rank.index())).sum(); };
      loss().backward();
      const auto waits = loss();
      const auto what = by_member ? "set on the member" : "set on the parameter";
      model->zero_grad();
      (by_member ? model->weight : model->parameters()[0]).set_grad_dtype(at::kDouble);
      loss().backward();
      check_scalar_type(rank, model->parameters()[0].grad(), at::kDouble, what);
    }
  }));
}

TEST_CASE("autograd::grad takes the mean in the dtype that backward takes it in", "[runtime][gradient_dtypes]") {
  for (const int ranks : {1, 2, 4})
    for (const bool has_history : {false, true}) {
      CAPTURE(ranks, has_history);
      CHECK(on_ranks(ranks, [&](Rank& rank) {
        Elementwise model;
        fully_shard(model, {.mesh = rank.mesh(), .mp_policy = kLowPolicy});
        const auto loss = [&] { return model->forward(activations_of(rank.index()).to(at::kBFloat16)).sum(); };
        const auto whole = [](const at::Tensor& tensor) { return full_tensor(tensor).detach().clone(); };
        const auto asked = torch::autograd::grad({loss()}, model->parameters(), {}, {}, /*create_graph=*/has_history);
        loss().backward();
        const auto expected = whole(model->parameters()[0].grad());
        rank.check_close(is_dtensor(asked[0]) ? whole(asked[0]) : asked[0].detach(), expected, "the mean", 1e-7);
        rank.check(!at::equal(expected, expected.to(at::kBFloat16).to(at::kFloat)) || ranks == 1, "which bfloat16 does not hold");
      }));
    }
}

TEST_CASE("autograd::grad divides float16 before and behind the sum, as backward does", "[runtime][gradient_dtypes]") {
  for (const bool has_history : {false, true}) {
    CAPTURE(has_history);
    CHECK(on_ranks(4, [&](Rank& rank) {
      Elementwise model(6, at::kHalf);
      fully_shard(model, {.mesh = rank.mesh()});
      // Four such values are more than float16 holds.
      const auto loss = model->forward(torch::full({1, 6}, 30000, at::kHalf)).sum();
      const auto asked = torch::autograd::grad({loss}, model->parameters(), {}, {}, /*create_graph=*/has_history)[0].detach();
      rank.check_identical(is_dtensor(asked) ? full_tensor(asked) : asked, torch::full({6}, 30000, at::kHalf), "the mean");
    }));
  }
}

TEST_CASE("autograd::grad gives its mean in the dtype that backward keeps, with history and without",
          "[runtime][gradient_dtypes]") {
  struct Kept {
    const char* what;
    std::optional<std::optional<at::ScalarType>> grad_dtype;
    MixedPrecisionPolicy policy;
    at::ScalarType expected;
  };
  const auto kept = GENERATE(
      Kept{"a grad_dtype", at::kDouble, {}, at::kDouble}, Kept{"a smaller grad_dtype", at::kBFloat16, {}, at::kBFloat16},
      Kept{"a grad_dtype of none", std::optional<at::ScalarType>(), {}, at::kDouble},
      Kept{"a grad_dtype of none under a policy",
           std::optional<at::ScalarType>(),
           {.reduce_dtype = at::kBFloat16},
           at::kBFloat16},
      Kept{"keep_low_precision_grads", {}, {.reduce_dtype = at::kBFloat16, .keep_low_precision_grads = true}, at::kBFloat16});
  const int ranks = GENERATE(1, 2);
  const bool has_history = GENERATE(false, true);
  CAPTURE(kept.what, ranks, has_history);
  CHECK(on_ranks(ranks, [&](Rank& rank) {
    Elementwise model;
    fully_shard(model, {.mesh = rank.mesh(), .mp_policy = kept.policy});
    if (kept.grad_dtype) model->weight.set_grad_dtype(*kept.grad_dtype);
    const auto loss = [&] { return model->forward(activations_of(rank.index()).to(at::kDouble)).sum(); };
    const auto asked = torch::autograd::grad({loss()}, model->parameters(), {}, {}, /*create_graph=*/has_history)[0].detach();
    loss().backward();
    const auto gradient = model->parameters()[0].grad();
    const bool stays_on_one = ranks == 1 && kept.policy.keep_low_precision_grads;  // nothing is reduced there
    check_scalar_type(rank, gradient, stays_on_one ? at::kFloat : kept.expected, "backward's");
    check_scalar_type(rank, asked, gradient.scalar_type(), "what was asked for");
    rank.check_identical(is_dtensor(asked) ? full_tensor(asked) : asked, full_tensor(gradient), "the mean");
  }));
}

TEST_CASE("autograd::grad on one rank rounds to no reduce dtype, as backward does not", "[runtime][gradient_dtypes]") {
  const bool has_history = GENERATE(false, true);
  CAPTURE(has_history);
  CHECK(on_ranks(1, [&](Rank& rank) {
    Elementwise model;
    fully_shard(model, {.mesh = rank.mesh(), .mp_policy = {.reduce_dtype = at::kBFloat16}});
    const auto loss = [&] { return model->forward(activations_of(0)).sum(); };
    const auto asked = torch::autograd::grad({loss()}, model->parameters(), {}, {}, /*create_graph=*/has_history)[0].detach();
    rank.check_identical(is_dtensor(asked) ? full_tensor(asked) : asked, activations_of(0).sum(0), "the gradient");
  }));
}

TEST_CASE("a copy's gradients have the grad_dtype of the original's, and so has a local shard",
          "[runtime][gradient_dtypes]") {
  CHECK(on_ranks(2, [&](Rank& rank) {
    auto model = torch::nn::Linear(6, 6);
    model->to(at::kBFloat16);
    for (auto& parameter : model->parameters()) parameter.set_grad_dtype(at::kFloat);
    fully_shard(model, {.mesh = rank.mesh()});
    const auto copy = std::dynamic_pointer_cast<torch::nn::LinearImpl>(fsdp::clone(*model));
    copy->forward(activations_of(rank.index()).to(at::kBFloat16)).sum().backward();
    for (const auto& parameter : copy->parameters())
      check_scalar_type(rank, parameter.grad(), at::kFloat, "of the copy");

    const auto shards = fsdp::local_shards(*model);
    model->forward(activations_of(rank.index()).to(at::kBFloat16)).sum().backward();
    for (const auto& shard : shards)
      check_scalar_type(rank, shard.shard.grad(), at::kFloat, "of the local shard");
  }));
}

}  // namespace fsdp::test
