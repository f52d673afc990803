#include <catch2/catch.hpp>

#include "support/models.hpp"

namespace fsdp::test {
namespace {

using Policy = MixedPrecisionPolicy;

void check_dtype(const Rank& rank, const at::Tensor& tensor, at::ScalarType expected, const std::string& what) {
  rank.check_equal(std::string(c10::toString(tensor.scalar_type())), std::string(c10::toString(expected)), what);
}

struct Sharded {
  Sharded(const DeviceMesh& mesh, const Policy& policy, int64_t width = 6)
      : model(seeded(5, [&] { return Chain(2, width); })) {
    for (auto& layer : model->layers) fully_shard(layer, {.mesh = mesh, .mp_policy = policy});
    root.push_back(fully_shard(model, {.mesh = mesh, .mp_policy = policy}));
  }
  at::Tensor loss(int rank, int step, int micro_batch = 0) {
    Inputs inputs(rank, step, micro_batch);
    return model->forward(inputs.normal({4, 6})).to(at::kFloat).square().mean();
  }
  Chain model;
  std::vector<FSDPModule> root;
};

/// One step of what mixed precision means, on full tensors: each rank's gradients in `compute`, added
/// up in `reduce`, averaged, and given to float32 weights.
NamedTensors expected_gradients(const Chain& master, int ranks, int step, at::ScalarType compute,
                                at::ScalarType reduce, int micro_batches = 1) {
  auto low = plain_chain(2);
  torch::NoGradGuard no_grad;
  auto weights = master->parameters(), copies = low->parameters();
  for (size_t i = 0; i < weights.size(); ++i) copies[i].copy_(weights[i]);
  low->to(compute);
  std::vector<at::Tensor> sums(weights.size());
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<at::Tensor> of_rank(weights.size());
    for (int micro = 0; micro < micro_batches; ++micro) {
      low->zero_grad(/*set_to_none=*/true);
      Inputs inputs(rank, step, micro);
      torch::AutoGradMode with_grad(true);
      low->forward(inputs.normal({4, 6}).to(compute)).to(at::kFloat).square().mean().backward();
      auto parameters = low->parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        const auto gradient = parameters[i].grad().detach().to(reduce);
        of_rank[i] = of_rank[i].defined() ? of_rank[i] + gradient : gradient;
      }
    }
    for (size_t i = 0; i < sums.size(); ++i) sums[i] = sums[i].defined() ? sums[i] + of_rank[i] : of_rank[i];
  }
  NamedTensors gradients;
  for (size_t i = 0; i < sums.size(); ++i)
    gradients.emplace_back(master->named_parameters().pairs()[i].first, (sums[i] * (1.0 / ranks)).to(at::kFloat));
  return gradients;
}

}  // namespace

TEST_CASE("computing in bfloat16 trains float32 shards", "[mixed_precision]") {
  for (const int ranks : {1, 2, 3, 4})
    for (const auto reduce : {std::optional<at::ScalarType>(), std::optional<at::ScalarType>(at::kFloat)}) {
      CAPTURE(ranks, reduce.has_value());
      CHECK(on_ranks(ranks, [&](Rank& rank) {
        Sharded sharded(rank.mesh(), {.param_dtype = at::kBFloat16, .reduce_dtype = reduce});
        auto master = plain_chain(2);
        torch::optim::SGD ours(sharded.model->parameters(), 0.1), theirs(master->parameters(), 0.1);
        for (int step = 0; step < 3; ++step) {
          const auto expected = expected_gradients(master, ranks, step, at::kBFloat16, reduce.value_or(at::kBFloat16));
          ours.zero_grad();
          sharded.loss(rank.index(), step).backward();
          auto parameters = sharded.model->named_parameters();
          auto plain = master->named_parameters();
          for (size_t i = 0; i < expected.size(); ++i) {
            const auto& [name, gradient] = expected[i];
            check_dtype(rank, parameters[name], at::kFloat, name + ": dtype");
            check_dtype(rank, parameters[name].grad(), at::kFloat, name + ": its gradient's dtype");
            rank.check_close(parameters[name].grad(), rows_of(gradient, rank.index(), ranks),
                             fmt::format("step {}: gradient of {}", step, name), reduce ? 1e-6 : 1e-2);
            // Rounding in bfloat16 would grow from step to step; each is compared from equal weights.
            plain[name].mutable_grad() = gradient;
          }
          ours.step();
          theirs.step();
          torch::NoGradGuard no_grad;
          for (size_t i = 0; i < expected.size(); ++i) {
            const auto& name = expected[i].first;
            parameters[name].copy_(plain[name]);
          }
        }
      }));
    }
}

TEST_CASE("unsharded parameters have param_dtype, and that is what is gathered and reduced", "[mixed_precision]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    Sharded sharded(rank.mesh(), {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat});
    check_dtype(rank, sharded.model->layers[0]->weight, at::kBFloat16, "the unsharded parameter");
    check_dtype(rank, sharded.model->layers[0]->parameters()[0], at::kFloat, "the sharded one");
    rank.log().clear();
    sharded.loss(rank.index(), 0).backward();
    // 6 x 6 weights and 6 biases; pieces are aligned to 16 bytes.
    for (const auto& call : rank.log().calls) {
      if (call.subject != "layer0") continue;
      const bool is_gather = call.operation == "all_gather";
      rank.check_equal(call.bytes, 2 * ((is_gather ? 48 : 80) + 16), call.operation);
    }
  }));
}

TEST_CASE("operators get their other operands in the unsharded parameter's dtype", "[mixed_precision]") {
  namespace nn = torch::nn;
  const Policy policy{.param_dtype = at::kBFloat16};
  CHECK(on_ranks(2, [&](Rank& rank) {
    const auto run = [&](const std::string& what, auto module, const at::Tensor& input) {
      fully_shard(module, {.mesh = rank.mesh(), .mp_policy = policy});
      const auto output = module->forward(input);
      check_dtype(rank, output, at::kBFloat16, what);
      output.sum().backward();
      for (const auto& parameter : module->parameters())
        rank.check(parameter.grad().defined() && parameter.grad().scalar_type() == at::kFloat, what + ": a gradient");
    };
    const auto input = torch::ones({4, 6}).requires_grad_();
    run("Linear", seeded(1, [] { return nn::Linear(6, 4); }), input);
    check_dtype(rank, input.grad(), at::kFloat, "an input's gradient");
    run("LayerNorm", nn::LayerNorm(nn::LayerNormOptions({6})), input);
    run("Embedding", seeded(1, [] { return nn::Embedding(8, 4); }), torch::arange(6));
    run("Conv2d", seeded(1, [] { return nn::Conv2d(2, 3, 3); }), torch::ones({1, 2, 5, 5}));
    run("Bilinear is made of several operators", seeded(1, [] { return nn::Linear(6, 6); }), input.view({2, 2, 6}));
    const auto norm = nn::BatchNorm1d(6);
    run("BatchNorm1d", norm, torch::arange(24.F).view({4, 6}));
    check_dtype(rank, norm->running_mean, at::kFloat, "statistics");
    rank.check_close(norm->running_mean, 0.1 * torch::arange(24.F).view({4, 6}).mean(0), "updated statistics", 1e-2);
  }));
}

TEST_CASE("an LSTM computes in bfloat16", "[mixed_precision]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto lstm = seeded(1, [] { return torch::nn::LSTM(6, 4); });
    fully_shard(lstm, {.mesh = rank.mesh(), .mp_policy = {.param_dtype = at::kBFloat16}});
    const auto output = std::get<0>(call(lstm, torch::ones({3, 2, 6})));
    check_dtype(rank, output, at::kBFloat16, "output");
    output.sum().backward();
    for (const auto& parameter : lstm->parameters())
      if (parameter.defined()) rank.check(parameter.grad().defined(), "a gradient");
  }));
}

TEST_CASE("a module boundary casts inputs and outputs", "[mixed_precision]") {
  struct SeesInputImpl : torch::nn::Module {
    std::tuple<at::Tensor, std::vector<at::Tensor>> forward(const at::Tensor& x, std::optional<at::Tensor> y, int times) {
      seen = {x.scalar_type(), y->scalar_type()};
      const auto result = linear->forward(x) * times;
      return {result, {result, torch::arange(3)}};
    }
    torch::nn::Linear linear = register_module("linear", torch::nn::Linear(6, 6));
    std::vector<at::ScalarType> seen;
  };
  CHECK(on_ranks(2, [](Rank& rank) {
    for (const bool casts : {true, false}) {
      auto model = seeded(3, [] { return std::make_shared<SeesInputImpl>(); });
      const auto compute = casts ? at::kBFloat16 : at::kFloat;
      fully_shard(*model, {.mesh = rank.mesh(),
                           .mp_policy = {.param_dtype = compute, .output_dtype = at::kDouble, .cast_forward_inputs = casts}});
      const auto [first, rest] = call(model, torch::ones({2, 6}), std::optional<at::Tensor>(torch::ones({1})), 2);
      rank.check(model->seen == std::vector<at::ScalarType>{compute, compute}, "inputs are cast");
      check_dtype(rank, first, at::kDouble, "the output");
      check_dtype(rank, rest[0], at::kDouble, "an output in a list");
      check_dtype(rank, rest[1], at::kLong, "integers stay");
      first.sum().backward();
      rank.check(model->linear->parameters()[0].grad().defined(), "a gradient came back");
    }
  }));
}

TEST_CASE("without cast_forward_inputs operands of another dtype are the user's business", "[mixed_precision]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto linear = seeded(1, [] { return torch::nn::Linear(6, 4); });
    fully_shard(linear, {.mesh = rank.mesh(), .mp_policy = {.param_dtype = at::kBFloat16, .cast_forward_inputs = false}});
    rank.check_throws<std::exception>([&] { linear->forward(torch::ones({2, 6})); }, {"dtype"}, "mixed dtypes");
    check_dtype(rank, linear->forward(torch::ones({2, 6}, at::kBFloat16)), at::kBFloat16, "the output");
  }));
}

TEST_CASE("one parameter may keep its dtype, in the same group", "[mixed_precision]") {
  CHECK(on_ranks(3, [](Rank& rank) {
    auto chain = plain_chain(2);
    const Policy policy{.param_dtype = at::kBFloat16,
                        .param_dtype_override = [](const std::string& name, const at::Tensor& parameter) {
                          return name == "head.weight" ? std::optional(parameter.scalar_type()) : std::nullopt;
                        }};
    fully_shard(chain, {.mesh = rank.mesh(), .mp_policy = policy});
    check_dtype(rank, chain->head->weight, at::kFloat, "kept");
    check_dtype(rank, chain->head->bias, at::kBFloat16, "cast");
    rank.log().clear();
    const auto hidden = torch::tanh(chain->layers[0]->forward(torch::ones({2, 6})));
    rank.check_equal(rank.subjects_of("all_gather").size(), size_t{1}, "one gather for all dtypes");
    (hidden.to(at::kFloat).matmul(chain->head->weight.t()).sum() + chain->head->bias.sum()).backward();
    rank.check_close(chain->head->parameters()[1].grad(), rows_of(torch::ones({2}), rank.index(), 3), "a cast one's gradient");
    check_dtype(rank, chain->head->parameters()[0].grad(), at::kFloat, "a kept one's gradient");
  }));
}

TEST_CASE("one rank gathers parameters that keep their dtype beside those that are cast", "[mixed_precision]") {
  for (const auto layout : {ParamLayout::kPerParameter, ParamLayout::kFlat})
    CHECK(on_ranks(1, [&](Rank& rank) {
      auto model = seeded(3, [] { return torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4)); });
      const auto& norm = *model->ptr(1)->as<torch::nn::BatchNorm1d>();
      {
        const at::NoGradGuard no_grad;
        norm.weight.fill_(0.5);
      }
      auto root = fully_shard(model, {.mesh = rank.mesh(), .mp_policy = {.param_dtype = at::kDouble}, .layout = layout});
      root.unshard();
      check_dtype(rank, norm.weight, at::kFloat, "exempt");
      rank.check_identical(norm.weight.detach().clone(), torch::full({4}, 0.5F), "what keeps its dtype");
      rank.check_identical(model->ptr(0)->as<torch::nn::Linear>()->weight.detach().to(at::kFloat), full_tensor(model->parameters()[0]),
                           "what is cast");
    }));
}

TEST_CASE("gradients of several micro-batches add up in the reduce dtype", "[mixed_precision]") {
  constexpr int kBatches = 5;
  CHECK(on_ranks(2, [](Rank& rank) {
    Sharded sharded(rank.mesh(), {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat});
    for (int micro = 0; micro < kBatches; ++micro) {
      sharded.root[0].set_requires_gradient_sync(micro + 1 == kBatches);
      sharded.loss(rank.index(), 0, micro).backward();
    }
    const auto expected = expected_gradients(plain_chain(2), 2, 0, at::kBFloat16, at::kFloat, kBatches);
    auto parameters = sharded.model->named_parameters();
    for (const auto& [name, gradient] : expected)
      rank.check_close(parameters[name].grad(), rows_of(gradient, rank.index(), 2), name, 1e-6);
  }));
}

TEST_CASE("reduced gradients may stay in the reduce dtype", "[mixed_precision]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    Sharded sharded(rank.mesh(), {.param_dtype = at::kBFloat16, .keep_low_precision_grads = true});
    sharded.loss(rank.index(), 0).backward();
    for (const auto& parameter : sharded.model->parameters())
      check_dtype(rank, parameter.grad(), at::kBFloat16, "a gradient");
  }));
}

TEST_CASE("float16 gradients are divided before and after the sum", "[mixed_precision]") {
  // Every rank's gradient is g: the sum 8 g leaves float16's range, half of it does not; and a small one
  // divided by 8 beforehand would vanish.
  for (const double g : {30'000.0, 6e-8 * 5}) {
    CAPTURE(g);
    CHECK(on_ranks(8, [g](Rank& rank) {
      auto linear = torch::nn::Linear(torch::nn::LinearOptions(1, 16).bias(false));
      fully_shard(linear, {.mesh = rank.mesh(), .mp_policy = {.param_dtype = at::kHalf}});
      linear->weight.sum().backward(torch::tensor(g, at::kHalf));
      const auto gradient = linear->parameters()[0].grad();
      rank.check_close(gradient, torch::full({2, 1}, torch::tensor(g, at::kHalf).item<double>()), "the average", 0.3);
      rank.check(gradient.isfinite().all().item<bool>(), "finite");
    }));
  }
}

TEST_CASE("floating-point buffers take buffer_dtype", "[mixed_precision]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    torch::nn::BatchNorm1d norm(6);
    fully_shard(norm, {.mesh = rank.mesh(), .mp_policy = {.buffer_dtype = at::kDouble}});
    check_dtype(rank, norm->running_var, at::kDouble, "running_var");
    check_dtype(rank, norm->num_batches_tracked, at::kLong, "num_batches_tracked");
  }));
}

TEST_CASE("a write through a cast unsharded parameter reaches the float32 shards", "[mixed_precision]") {
  for (const int ranks : {1, 3})
    CHECK(on_ranks(ranks, [ranks](Rank& rank) {
      auto linear = seeded(1, [] { return torch::nn::Linear(6, 5); });
      fully_shard(linear, {.mesh = rank.mesh(), .mp_policy = {.param_dtype = at::kBFloat16}});
      const auto values = torch::arange(30.F).view({5, 6});
      {
        torch::NoGradGuard no_grad;
        linear->weight.copy_(values);
      }
      rank.check_identical(linear->parameters()[0].detach(), rows_of(values, rank.index(), ranks), "the rows");
      rank.check_identical(linear->weight.detach().to(at::kFloat), values, "the unsharded parameter");
    }));
}

TEST_CASE("param_dtype must be a floating-point dtype", "[mixed_precision]") {
  CHECK(on_ranks(1, [](Rank& rank) {
    torch::nn::Linear linear(2, 2);
    rank.check_throws<UsageError>(
        [&] { fully_shard(linear, {.mesh = rank.mesh(), .mp_policy = {.param_dtype = at::kInt}}); },
        {"weight", "param_dtype", "Int"}, "an integer dtype");
    rank.check(!is_fsdp_parameter(linear->weight), "nothing has changed");
  }));
}

TEST_CASE("a write to a few elements leaves the others' float32 bits", "[mixed_precision]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto linear = seeded(1, [] { return torch::nn::Linear(6, 4); });
    const auto before = linear->weight.detach().clone();
    fully_shard(linear, {.mesh = rank.mesh(), .mp_policy = {.param_dtype = at::kBFloat16}});
    {
      torch::NoGradGuard no_grad;
      linear->weight[1].fill_(7);
    }
    auto expected = before.clone();
    expected[1].fill_(7);
    rank.check_identical(linear->parameters()[0].detach(), rows_of(expected, rank.index(), 2), "the rows");
  }));
}

TEST_CASE("exempt modules compute in full precision and give low precision back", "[mixed_precision]") {
  namespace nn = torch::nn;
  CHECK(on_ranks(2, [](Rank& rank) {
    auto make = [] { return seeded(1, [] { return nn::Sequential(nn::Linear(6, 6), nn::BatchNorm1d(6), nn::LayerNorm(nn::LayerNormOptions({6}))); }); };
    const auto is_layer_norm = [](const nn::Module& module) { return dynamic_cast<const nn::LayerNormImpl*>(&module) != nullptr; };
    const auto x = torch::randn({4, 6}, torch::make_generator<at::CPUGeneratorImpl>(7));
    auto model = make();
    fully_shard(model, {.mesh = rank.mesh(), .mp_policy = {.param_dtype = at::kBFloat16}});
    auto* norm = model[1]->as<nn::BatchNorm1d>();
    check_dtype(rank, norm->weight, at::kFloat, "BatchNorm is exempt by default");
    check_dtype(rank, model[2]->as<nn::LayerNorm>()->weight, at::kBFloat16, "LayerNorm is not");
    for (int step = 0; step < 2; ++step) {
      const auto output = model->forward(x);
      check_dtype(rank, output, at::kBFloat16, "the output");
      output.square().mean().backward();
    }
    rank.check_close(norm->running_mean, 0.19 * make()[0]->as<nn::Linear>()->forward(x).mean(0).detach(), "statistics", 2e-2);
    rank.check(norm->parameters()[0].grad().defined(), "an exempt one's gradient");

    auto other = make();
    fully_shard(other, {.mesh = rank.mesh(), .mp_policy = {.param_dtype = at::kBFloat16, .is_exempt = is_layer_norm}});
    auto* layer_norm = other[2]->as<nn::LayerNorm>();
    check_dtype(rank, layer_norm->weight, at::kFloat, "the user's choice");
    check_dtype(rank, layer_norm->forward(x.to(at::kBFloat16)), at::kBFloat16, "given back");
  }));
}

namespace {

struct RmsNormImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    last_mean = x.square().mean(-1, /*keepdim=*/true);
    return weight * x * torch::rsqrt(last_mean + 1e-6);
  }
  at::Tensor weight = register_parameter("weight", torch::linspace(0.5, 1.5, 6));
  at::Tensor last_mean;
};
TORCH_MODULE(RmsNorm);

struct NormedImpl : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(6, 6));
  RmsNorm norm = register_module("norm", RmsNorm());
  torch::nn::MultiheadAttention attention = register_module("attention", torch::nn::MultiheadAttention(6, 2));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(6, 6));
  at::Tensor forward(at::Tensor x) {
    x = call(norm, first(x));
    return last(x + std::get<0>(call(attention, x, x, x)));
  }
  /// What it is to compute: the linear layers in bfloat16, the others in float32.
  at::Tensor by_hand(const at::Tensor& x) {
    auto in_half = [](const torch::nn::Linear& layer, const at::Tensor& input) {
      return torch::linear(input, layer->weight.to(at::kBFloat16), layer->bias.to(at::kBFloat16));
    };
    const auto normed = norm(in_half(first, x.to(at::kBFloat16)).to(at::kFloat)).to(at::kBFloat16);
    const auto wide = normed.to(at::kFloat);
    return in_half(last, normed + std::get<0>(attention(wide, wide, wide)).to(at::kBFloat16));
  }
};
TORCH_MODULE(Normed);

bool is_norm_or_attention(const torch::nn::Module& module) {
  return dynamic_cast<const RmsNormImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::MultiheadAttentionImpl*>(&module) != nullptr;
}

}  // namespace

TEST_CASE("buffers of exempt modules keep their dtype, as their kernels need", "[mixed_precision]") {
  namespace nn = torch::nn;
  CHECK(on_ranks(2, [](Rank& rank) {
    auto model = seeded(1, [] { return nn::Sequential(nn::Linear(6, 6), nn::BatchNorm1d(6)); });
    fully_shard(model, {.mesh = rank.mesh(), .mp_policy = {.param_dtype = at::kBFloat16, .buffer_dtype = at::kBFloat16}});
    for (const bool trains : {true, false}) {
      model->train(trains);
      check_dtype(rank, model->forward(torch::ones({4, 6})), at::kBFloat16, "the output");
    }
    check_dtype(rank, model[1]->as<nn::BatchNorm1d>()->running_mean, at::kFloat, "the statistics");
  }));
}

TEST_CASE("an exempt module's descendants are exempt, too", "[mixed_precision]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto model = seeded(4, [] { return Normed(); });
    const auto root = fully_shard(model, {.mesh = rank.mesh(), .mp_policy = {.param_dtype = at::kBFloat16, .is_exempt = &is_norm_or_attention}});
    check_dtype(rank, model->attention->in_proj_weight, at::kFloat, "its own parameter");
    check_dtype(rank, model->attention->out_proj->weight, at::kFloat, "one of a module in it");
    check_dtype(rank, model->norm->weight, at::kFloat, "the norm's");
    check_dtype(rank, model->first->weight, at::kBFloat16, "another module's");
    const auto output = model->forward(Inputs(rank.index(), 0).normal({4, 2, 6}));
    check_dtype(rank, output, at::kBFloat16, "the output");
    output.to(at::kFloat).square().mean().backward();
    const auto text = root.report().to_string();
    rank.check(text.find("exempt from mixed precision: norm.weight, attention.") != std::string::npos, "reported: " + text);
  }));
}

TEST_CASE("a policy makes units of exempt modules, which compute in full precision between casts at their boundary",
          "[mixed_precision][wrap_policy]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    for (const auto& policy : {wrap_class<torch::nn::Conv2dImpl>(), wrap_class<torch::nn::LinearImpl>()}) {
      auto make = [] { return seeded(4, [] { return Normed(); }); };
      auto model = make(), plain = make();
      const FullyShardOptions options{.mesh = rank.mesh(), .mp_policy = {.param_dtype = at::kBFloat16, .is_exempt = &is_norm_or_attention}};
      const auto plan = plan_wrapping(*model, policy, options);
      std::vector<std::string> exempt;
      for (const auto& unit : plan.units)
        if (unit.is_exempt) exempt.push_back(unit.name);
      const bool has_out_proj = plan.units.size() == 6;
      rank.check_equal(exempt, has_out_proj ? std::vector<std::string>{"norm", "attention.out_proj", "attention"}
                                            : std::vector<std::string>{"norm", "attention"},
                       "exempt units");
      rank.check(plan.to_string().find("  note: exempt from mixed precision") != std::string::npos, plan.to_string());
      apply_wrapping(plan);
      for (int step = 0; step < 2; ++step) {
        const auto x = Inputs(rank.index(), step).normal({4, 2, 6});
        const auto output = model->forward(x);
        check_dtype(rank, model->norm->last_mean, at::kFloat, "the norm's mean");
        rank.check_close(output.detach(), plain->by_hand(x).detach(), "as by hand", 1e-2);
        output.to(at::kFloat).square().mean().backward();
      }
      rank.check(model->norm->parameters()[0].grad().defined(), "the norm's gradient");
    }
    const auto plan = plan_wrapping(*Normed(), wrap_class<torch::nn::Conv2dImpl>(), {.mesh = rank.mesh(), .mp_policy = {.is_exempt = &is_norm_or_attention}});
    rank.check_equal(plan.units.size(), size_t{1}, "there is nothing to be exempt from");
  }));
}

TEST_CASE("a boundary passes on what is no tensor, and forwards that return nothing", "[mixed_precision]") {
  struct CountsImpl : torch::nn::Module {
    void forward(const at::Tensor& x, int& calls) { calls += static_cast<int>(linear->forward(x).numel()); }
    torch::nn::Linear linear = register_module("linear", torch::nn::Linear(6, 6));
  };
  CHECK(on_ranks(2, [](Rank& rank) {
    auto model = std::make_shared<CountsImpl>();
    fully_shard(*model, {.mesh = rank.mesh()});
    int calls = 0;
    call(model, torch::ones({2, 6}), calls);
    rank.check_equal(calls, 12, "the caller's own variable");
  }));
}

}  // namespace fsdp::test
