#include <catch2/catch.hpp>

#include "support/models.hpp"
#include "support/scoped_environment.hpp"

// MixedPrecisionPolicy::full_precision_in_eval: low precision is for training alone.

namespace fsdp::test {
namespace {

const MixedPrecisionPolicy kPolicy{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat, .full_precision_in_eval = true};

Chain sharded_chain(const DeviceMesh& mesh, const FullyShardOptions& more = {.mp_policy = kPolicy}) {
  auto model = plain_chain(2);
  auto options = more;
  options.mesh = mesh;
  for (auto& layer : model->layers) fully_shard(layer, options);
  fully_shard(model, options);
  return model;
}

at::Tensor input_of(int rank, int step = 0) { return Inputs(rank, step).normal({4, 6}); }

at::Tensor step_loss(Chain& model, int rank, int step) {
  return model->forward(input_of(rank, step)).to(at::kFloat).square().mean();
}

std::string dtype_of(const at::Tensor& tensor) { return c10::toString(tensor.scalar_type()); }

/// An evaluation, as users write it.
enum class Style { kScope, kCall, kReads };

at::Tensor evaluate(Chain& model, const at::Tensor& x, Style style) {
  torch::NoGradGuard no_grad;
  if (style == Style::kCall) return call(model, x);
  if (style == Style::kReads) return model->forward(x);
  const auto scope = forward_scope(*find_fsdp_module(*model));
  return model->forward(x);
}

}  // namespace

TEST_CASE("in eval mode parameters are gathered and computed in their own dtype", "[full_precision_in_eval]") {
  for (const int ranks : {1, 2, 3})
    for (const auto style : {Style::kScope, Style::kCall, Style::kReads})
      for (const auto layout : {ParamLayout::kPerParameter, ParamLayout::kFlat}) {
        CAPTURE(ranks, static_cast<int>(style), static_cast<int>(layout));
        CHECK(on_ranks(ranks, [&](Rank& rank) {
          auto model = sharded_chain(rank.mesh(), {.mp_policy = kPolicy, .layout = layout});
          auto plain = plain_chain(2);
          torch::optim::SGD optimizer(model->parameters(), 0.1);
          for (int round = 0; round < 2; ++round) {
            model->train();
            auto loss = step_loss(model, rank.index(), round);
            rank.check_equal(dtype_of(model->head->weight), std::string("BFloat16"), "the unsharded parameter in training");
            optimizer.zero_grad();
            loss.backward();
            optimizer.step();
            torch::NoGradGuard no_grad;
            for (auto& [name, parameter] : model->named_parameters().pairs())
              plain->named_parameters()[name].copy_(full_tensor(parameter));
            model->eval();
            const auto x = input_of(7, round);
            const auto output = evaluate(model, x, style);
            rank.check_equal(dtype_of(output), std::string("Float"), "the output's dtype");
            rank.check_equal(dtype_of(model->head->weight), std::string("Float"), "the unsharded parameter in eval");
            rank.check_identical(output, plain->forward(x), "the output, bit for bit");
          }
        }));
      }
}

TEST_CASE("training is the same with evaluations between its steps", "[full_precision_in_eval]") {
  for (const int ranks : {1, 2}) {
    CAPTURE(ranks);
    CHECK(on_ranks(ranks, [](Rank& rank) {
      auto with = sharded_chain(rank.mesh());
      auto without = sharded_chain(rank.mesh(), {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
      torch::optim::Adam ours(with->parameters()), theirs(without->parameters());
      for (int step = 0; step < 4; ++step) {
        for (auto& [model, optimizer] : {std::pair<Chain&, torch::optim::Adam&>{with, ours}, {without, theirs}}) {
          optimizer.zero_grad();
          const auto loss = step_loss(model, rank.index(), step);
          rank.check_equal(dtype_of(model->layers[0]->weight), std::string("BFloat16"), "the unsharded parameter");
          loss.backward();
          optimizer.step();
        }
        with->eval();
        evaluate(with, input_of(rank.index()), step % 2 == 0 ? Style::kScope : Style::kReads);
        with->train();
      }
      const auto expected = without->parameters();
      for (size_t i = 0; i < expected.size(); ++i)
        rank.check_identical(with->parameters()[i].detach(), expected[i].detach(), "a weight");
    }));
  }
}

TEST_CASE("gradients that wait for a reduction outlive an evaluation", "[full_precision_in_eval]") {
  for (const auto reduce : {std::optional<at::ScalarType>(at::kFloat), std::optional<at::ScalarType>()})
    CHECK(on_ranks(2, [&](Rank& rank) {
      auto policy = kPolicy;
      policy.reduce_dtype = reduce;
      auto with = sharded_chain(rank.mesh(), {.mp_policy = policy});
      policy.full_precision_in_eval = false;
      auto without = sharded_chain(rank.mesh(), {.mp_policy = policy});
      for (auto* model : {&with, &without}) {
        auto root = *find_fsdp_module(**model);
        for (int micro = 0; micro < 3; ++micro) {
          root.set_requires_gradient_sync(micro == 2);
          step_loss(*model, rank.index(), micro).backward();
          (*model)->eval();
          evaluate(*model, input_of(0), Style::kScope);
          (*model)->train();
        }
      }
      for (size_t i = 0; i < with->parameters().size(); ++i)
        rank.check_identical(with->parameters()[i].grad(), without->parameters()[i].grad(), "a gradient");
    }));
}

TEST_CASE("a backward in eval mode gives gradients in full precision", "[full_precision_in_eval]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto model = sharded_chain(rank.mesh());
    model->eval();
    step_loss(model, rank.index(), 0).backward();
    auto plain = plain_chain(2);
    check_gradients(rank, *model, averaged_gradients(plain, 2), "in eval mode");
  }));
}

TEST_CASE("a view as the first use sees the new dtype", "[full_precision_in_eval]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto model = sharded_chain(rank.mesh());
    step_loss(model, rank.index(), 0).backward();
    model->eval();
    torch::NoGradGuard no_grad;
    const auto x = torch::ones({2, 6});
    const auto plain = plain_chain(2);
    rank.check_identical(torch::matmul(x, model->head->weight.t()), torch::matmul(x, plain->head->weight.t()), "t()");
    model->train();
    rank.check_equal(dtype_of(model->head->weight[0].sum()), std::string("BFloat16"), "select(), in training again");
  }));
}

TEST_CASE("a mode that changes within a step is refused by name", "[full_precision_in_eval]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto model = sharded_chain(rank.mesh());
    auto loss = step_loss(model, rank.index(), 0);
    model->eval();
    rank.check_throws<StateError>([&] { evaluate(model, input_of(0), Style::kScope); },
                                  {"layer0", "training to eval mode", "in the middle of a step"}, "before backward");
    loss.backward();  // in the dtypes of its forward
    rank.check(model->head->parameters()[0].grad().defined(), "nothing is lost");
    rank.check_equal(dtype_of(evaluate(model, input_of(0), Style::kReads)), std::string("Float"), "after backward");
    model->train();
    auto graph = step_loss(model, rank.index(), 0);
    graph.backward({}, /*retain_graph=*/true);
    model->eval();
    evaluate(model, input_of(0), Style::kScope);
    rank.check_throws<std::exception>([&] { graph.backward(); }, {"modified by an inplace operation"},
                                      "a graph from before, as after any write");
    find_fsdp_module(*model)->reset_iter_state();
    model->train();
    step_loss(model, rank.index(), 1).backward();
  }));
}

TEST_CASE("boundary casts and exempt modules follow the mode", "[full_precision_in_eval]") {
  namespace nn = torch::nn;
  CHECK(on_ranks(2, [](Rank& rank) {
    auto make = [] { return seeded(1, [] { return nn::Sequential(nn::Linear(6, 6), nn::BatchNorm1d(6), nn::Linear(6, 3)); }); };
    auto model = make(), plain = make();
    fully_shard(model, {.mesh = rank.mesh(), .mp_policy = kPolicy});
    model->eval();
    plain->eval();
    torch::NoGradGuard no_grad;
    const auto x = input_of(3);
    rank.check_identical(call(model, x), plain->forward(x), "through the boundary, bit for bit");
    model->train();
    rank.check_equal(dtype_of(call(model, x)), std::string("BFloat16"), "the output in training again");
  }));
}

TEST_CASE("FSDP1's variable asks for it in every policy that casts", "[full_precision_in_eval]") {
  const ScopedEnvironment set(Variables{{"FSDP_USE_FULL_PREC_IN_EVAL", "1"}});
  CHECK(on_ranks(2, [](Rank& rank) {
    auto model = sharded_chain(rank.mesh(), {.mp_policy = {.param_dtype = at::kBFloat16}});
    for (const bool trains : {true, false, true}) {
      model->train(trains);
      torch::NoGradGuard no_grad;
      rank.check_equal(dtype_of(model->forward(input_of(0))), std::string(trains ? "BFloat16" : "Float"), "the output");
    }
    torch::nn::Linear on_the_stack(2, 2);
    fully_shard(*on_the_stack, {.mesh = rank.mesh()});  // casts nothing, so that no mode is asked for
  }));
}

TEST_CASE("buffers follow the mode", "[full_precision_in_eval]") {
  struct ShiftImpl : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) { return linear(x) + shift.to(x.scalar_type()); }
    torch::nn::Linear linear = register_module("linear", torch::nn::Linear(6, 6));
    at::Tensor shift = register_buffer("shift", torch::full({6}, 0.5F));
  };
  CHECK(on_ranks(2, [](Rank& rank) {
    auto policy = kPolicy;
    policy.buffer_dtype = at::kBFloat16;
    auto model = seeded(2, [] { return std::make_shared<ShiftImpl>(); });
    fully_shard(*model, {.mesh = rank.mesh(), .mp_policy = policy});
    for (const bool trains : {true, false, true}) {
      model->train(trains);
      model->forward(input_of(0)).sum().backward();
      rank.check_equal(dtype_of(model->shift), std::string(trains ? "BFloat16" : "Float"), "the buffer");
      rank.check_equal(saved_dtype(*model, model->shift) == at::kFloat, true, "what it is saved in");
    }
  }));
}

TEST_CASE("each module of its own mode", "[full_precision_in_eval]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto model = sharded_chain(rank.mesh());
    model->layers[0]->eval();  // frozen, say
    step_loss(model, rank.index(), 0).backward();
    rank.check_equal(dtype_of(model->layers[0]->weight), std::string("Float"), "in eval");
    rank.check_equal(dtype_of(model->layers[1]->weight), std::string("BFloat16"), "in training");
    to(*model, at::kDouble);
    model->eval();
    torch::NoGradGuard no_grad;
    rank.check_equal(dtype_of(model->forward(input_of(0))), std::string("Double"), "after a conversion");
    model->train();
    rank.check_equal(dtype_of(model->forward(input_of(0))), std::string("BFloat16"), "and back");
  }));
}

TEST_CASE("a module on the stack cannot be asked for its mode later", "[full_precision_in_eval]") {
  CHECK(on_ranks(1, [](Rank& rank) {
    torch::nn::LinearImpl linear(2, 2);
    rank.check_throws<UsageError>([&] { fully_shard(linear, {.mesh = rank.mesh(), .mp_policy = kPolicy}); },
                                  {"full_precision_in_eval", "shared_ptr"}, "on the stack");
  }));
}

}  // namespace fsdp::test
