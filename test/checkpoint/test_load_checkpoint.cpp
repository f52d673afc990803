#include <catch2/catch.hpp>
#include <fmt/ranges.h>

#include "saved_parts.hpp"
#include "support/models.hpp"
#include "support/odd_model.hpp"
#include "support/sample.hpp"
#include "temporary_folder.hpp"

// Models with their optimizers, and all the ways in which a checkpoint can fit or not.

namespace fsdp::test {
namespace {

namespace nn = torch::nn;
using at::Tensor;

NamedTensors two_tensors() { return {{"a", torch::arange(6.).view({2, 3})}, {"b", torch::arange(5)}}; }

/// Steps on the same batches, whatever the world. In eval mode: in train mode the normalisation takes biases out again, and
/// the optimizers would scale gradients of mere rounding up to whole steps.
void train(Odd& model, torch::optim::Optimizer& optimizer, int steps) {
  model->eval();
  for (int step = 0; step < steps; ++step) {
    Inputs in(/*rank=*/0, step);
    optimizer.zero_grad();
    model->loss(in).backward();
    optimizer.step();
  }
}

template <class Optimizer, class Options>
void check_resume(const Options& options, const std::string& what) {
  TemporaryFolder folder;
  for (const auto& from : odd_cases())
    on_ranks(from.world_size, [&](Rank& rank) {
      auto model = plain_odd();
      shard_odd(model, rank, from);
      Optimizer optimizer(model->parameters(), options);
      train(model, optimizer, 2);
      save_checkpoint(folder / from.name, {model, optimizer, R"({"step": 2})"}, {.world = rank.world()});
      rank.check(true, what);
    });
  auto plain = plain_odd();
  Optimizer expected(plain->parameters(), options);  // has a tied one twice, as the sharded one
  train(plain, expected, 3);
  const auto weights = plain->named_parameters();
  Sample sample(1);
  for (const auto& from : odd_cases())
    for (const auto& to : {odd_cases()[0], odd_cases()[2], odd_cases()[4]})
      if (sample.takes_next()) CHECK(on_ranks(to.world_size, [&](Rank& rank) {
        auto model = plain_odd(99);
        shard_odd(model, rank, to);
        Optimizer optimizer(model->parameters(), Options(0.5));
        const auto loaded = load_checkpoint(folder / from.name, {model, optimizer}, {.world = rank.world()});
        rank.check_equal(loaded.extra, std::string(R"({"step": 2})"), "extra");
        rank.check_equal(loaded.restored_rng_state, from.world_size == to.world_size, "rng");
        model->eval();
        // One more step, which uses every state tensor, counter and option.
        Inputs in(0, 2);
        optimizer.zero_grad();
        model->loss(in).backward();
        optimizer.step();
        for (const auto& item : model->named_parameters())
          rank.check_close(is_fsdp_parameter(item.value()) ? full_tensor(item.value()) : item.value().detach(),
                           weights[item.key()].detach(), what + " " + from.name + " -> " + to.name + ": " + item.key(), 1e-4);
      }));
}

TEST_CASE("training goes on from a checkpoint of any world as if it had never stopped", "[checkpoint][load_checkpoint]") {
  check_resume<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2).amsgrad(true).weight_decay(0.1), "AdamW");
  check_resume<torch::optim::SGD>(torch::optim::SGDOptions(1e-2).momentum(0.9).nesterov(true), "SGD");
  check_resume<torch::optim::RMSprop>(torch::optim::RMSpropOptions(1e-2).momentum(0.5).centered(true), "RMSprop");
  check_resume<torch::optim::Adagrad>(torch::optim::AdagradOptions(1e-2), "Adagrad");
}

TEST_CASE("an optimizer that Python has saved counts in float32, and has options that are unset or not known here",
          "[checkpoint][load_checkpoint]") {
  TemporaryFolder folder;
  const auto weight = torch::arange(6.).view({3, 2});
  NamedTensors state;
  for (const auto* field : {"exp_avg", "exp_avg_sq"}) state.push_back({std::string("weight.") + field, weight + state.size()});
  state.push_back({"weight.step", torch::tensor(7.F)});
  auto optimizer_section = whole_section(state);
  optimizer_section.name = "optimizer";
  save_checkpoint_parts(folder / "c", {{whole_section({{"weight", weight}}), optimizer_section}, {{"optimizer.json", R"({
      "optimizer": "AdamW", "values": {"weight": {"seen": 3}}, "groups": [{"params": ["weight"], "options": {
      "lr": 0.25, "betas": [0.5, 0.75], "foreach": null, "maximize": false, "name": "odd"}}]})"}}});
  nn::Linear linear(nn::LinearOptions(2, 3).bias(false));
  torch::optim::AdamW optimizer(linear->parameters(), 1.0);
  load_checkpoint(folder / "c", {linear, optimizer});
  const auto& options = static_cast<torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options());
  CHECK(options.lr() == 0.25);
  CHECK(std::get<1>(options.betas()) == 0.75);
  const auto& loaded = static_cast<torch::optim::AdamWParamState&>(*optimizer.state().begin()->second);
  CHECK(loaded.step() == 7);
  CHECK(at::equal(loaded.exp_avg_sq(), weight + 1));
  CHECK(at::equal(linear->weight, weight));
}

TEST_CASE("a tied parameter is saved once, and found under each of its names", "[checkpoint][load_checkpoint]") {
  TemporaryFolder folder;
  CHECK(on_ranks(2, [&](Rank& rank) {
    auto model = plain_odd();
    shard_odd(model, rank, {"", 2});
    save_checkpoint(folder / "c", {model}, {.world = rank.world()});
    CheckpointReader reader(folder / "c", {.world = rank.world(), .strict = false});
    std::vector<std::string> names;
    for (const auto& tensor : reader.tensors("model")) names.push_back(tensor.name);
    rank.check_equal(std::count(names.begin(), names.end(), "embed.weight"), std::ptrdiff_t{1}, "first name");
    rank.check_equal(std::count(names.begin(), names.end(), "head.weight"), std::ptrdiff_t{0}, "other name");
    auto embed = torch::zeros({7, 5}), head = torch::zeros({7, 5});
    const auto misfits = reader.load({whole_section({{"embed.weight", embed}, {"head.weight", head}})});
    rank.check(misfits.missing.empty() && misfits.wrong.empty(), "both are there");
    rank.check_identical(embed, plain_odd()->embed->weight.detach(), "embed");
    rank.check_identical(head, embed, "an untied head");
  }));
}

TEST_CASE("everything that does not fit is told at once, and nothing is changed", "[checkpoint][load_checkpoint]") {
  TemporaryFolder folder;
  CHECK(on_ranks(2, [&](Rank& rank) {
    save_checkpoint_parts(folder / "c", {{whole_section(two_tensors())}}, {.world = rank.world()});
    const NamedTensors into{{"a", torch::zeros({3, 2})}, {"b", torch::zeros({5})}, {"c", torch::zeros({1})}};
    rank.check_throws<UsageError>([&] { CheckpointReader(folder / "c", {.world = rank.world()}).load({whole_section(into)}); },
                                  {"Missing: 'c'", "'a' has sizes (2, 3), expected (3, 2)", "'b' is I64, expected F32", "nothing was changed"},
                                  "strict");
    rank.check_throws<UsageError>([&] { CheckpointReader(folder / "c", {.world = rank.world()}).load({whole_section({into[1]})}); },
                                  {"Unexpected: 'a'", "'b' is I64"}, "unexpected");
    for (const auto& [name, tensor] : into) rank.check(!tensor.any().item<bool>(), name + " is what it was");
    CheckpointReader loose(folder / "c", {.world = rank.world(), .strict = false, .convert_dtypes = true});
    const auto misfits = loose.load({whole_section(into)});
    rank.check_equal(misfits.missing, std::vector<std::string>{"'c'"}, "missing");
    rank.check_equal(misfits.wrong.size(), size_t{1}, "wrong");
    rank.check_identical(into[1].second, torch::arange(5).to(at::kFloat), "what fits is there");
    auto model = plain_odd();
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    rank.check_throws<UsageError>([&] { load_checkpoint(folder / "c", {model, optimizer}, {.world = rank.world()}); },
                                  {"'embed.weight'", "the optimizer", "Unexpected: 'a', 'b'"}, "a model and an optimizer");
  }));
}

TEST_CASE("ranks may have different tensors, as stages of a pipeline: what no rank asks for is unexpected",
          "[checkpoint][load_checkpoint]") {
  TemporaryFolder folder;
  CHECK(on_ranks(3, [&](Rank& rank) {
    const auto own = [&](float value) {
      return whole_section({{fmt::format("stage{}", rank.index()), torch::full({4}, value + rank.index())},
                            {"shared", torch::full({2}, value)}});
    };
    save_checkpoint_parts(folder / "c", {{own(5)}}, {.world = rank.world()});
    const auto section = own(0);
    const auto misfits = CheckpointReader(folder / "c", {.world = rank.world()}).load({section});
    rank.check(misfits.empty(), "everything is asked for by some rank");
    rank.check_identical(section.tensors[0].local, torch::full({4}, 5. + rank.index()), "the stage's own");
    rank.check_identical(section.tensors[1].local, torch::full({2}, 5.), "what all have");
    auto less = section;
    if (rank.index() == 1) less.tensors.erase(less.tensors.begin());
    less.tensors.pop_back();
    rank.check_throws<UsageError>([&] { CheckpointReader(folder / "c", {.world = rank.world()}).load({less}); },
                                  {"Unexpected: 'shared', 'stage1'."}, "left out by all");
  }));
}

TEST_CASE("each stage of a pipeline has its own parameters and optimizer in one checkpoint", "[checkpoint][load_checkpoint]") {
  TemporaryFolder folder;
  struct Stage : nn::Module {
    explicit Stage(int rank, double value) {
      weight = register_parameter(fmt::format("stage{}", rank), torch::full({3}, value));
      unused = register_parameter(fmt::format("unused{}", rank), torch::zeros({2}));
    }
    Tensor weight, unused;
  };
  for (const double momentum : {0.0, 0.5})
    CHECK(on_ranks(2, [&](Rank& rank) {
      const auto path = folder / fmt::format("momentum-{}", momentum > 0 ? 1 : 0);
      const auto step = [&](Stage& stage, torch::optim::SGD& optimizer) {
        optimizer.zero_grad();
        (stage.weight * (rank.index() + 1.0)).sum().backward();
        optimizer.step();
      };
      const auto options = torch::optim::SGDOptions(0.1).momentum(momentum);
      auto saved = std::make_shared<Stage>(rank.index(), 5), loaded = std::make_shared<Stage>(rank.index(), 0);
      torch::optim::SGD optimizer(saved->parameters(), options), other(loaded->parameters(), options);
      step(*saved, optimizer);
      save_checkpoint(path, {.model = saved, .optimizer = optimizer}, {.world = rank.world()});
      const auto result = load_checkpoint(path, {.model = loaded, .optimizer = other}, {.world = rank.world()});
      rank.check(result.misfits.empty(), "everything fits");
      step(*saved, optimizer);
      step(*loaded, other);
      rank.check_identical(loaded->weight.detach(), saved->weight.detach(), "goes on as the other");
    }));
  CHECK(on_ranks(2, [&](Rank& rank) {
    auto stage = std::make_shared<Stage>(rank.index(), 5);
    torch::optim::SGD sgd(stage->parameters(), 0.1);
    torch::optim::AdamW adamw(stage->parameters(), 0.1);
    rank.check_throws<UsageError>(
        [&] {
          if (rank.index() == 0) save_checkpoint(folder / "c", {.model = stage, .optimizer = sgd}, {.world = rank.world()});
          else save_checkpoint(folder / "c", {.model = stage, .optimizer = adamw}, {.world = rank.world()});
        },
        {"AdamW", "SGD"}, "two classes");
  }));
}

TEST_CASE("without strict a parameter's state is loaded whole or left as it is", "[checkpoint][load_checkpoint]") {
  TemporaryFolder folder;
  const auto step = [](nn::Sequential& model, torch::optim::AdamW& optimizer) {
    model->forward(torch::ones({2, 4})).square().sum().backward();
    optimizer.step();
  };
  nn::Sequential saved({{"body", nn::Linear(4, 4)}, {"embed", nn::Linear(4, 3)}});
  torch::optim::AdamW optimizer(saved->parameters());
  step(saved, optimizer);
  step(saved, optimizer);
  save_checkpoint(folder / "c", {saved, optimizer});

  nn::Sequential model({{"body", nn::Linear(4, 4)}, {"embed", nn::Linear(4, 5)}, {"head", nn::Linear(5, 2)}});
  torch::optim::AdamW other(model->parameters());
  const bool has_state = GENERATE(false, true);
  if (has_state) step(model, other);
  const auto state = [](const torch::optim::AdamW& of, const Tensor& parameter) -> const torch::optim::AdamWParamState* {
    const auto found = of.state().find(parameter.unsafeGetTensorImpl());
    return found == of.state().end() ? nullptr : static_cast<const torch::optim::AdamWParamState*>(found->second.get());
  };
  const auto loaded = load_checkpoint(folder / "c", {model, other}, {.strict = false});
  const auto wrong = fmt::format("{}", fmt::join(loaded.misfits.wrong, ", "));
  CHECK_THAT(wrong, Catch::Contains("'embed.weight' has sizes (3, 4)") && Catch::Contains("'embed.weight.exp_avg' has sizes (3, 4), expected ("));
  for (const auto* name : {"body.weight", "body.bias"}) {
    const auto *now = state(other, model->named_parameters()[name]), *then = state(optimizer, saved->named_parameters()[name]);
    REQUIRE(now != nullptr);
    CHECK(now->step() == 2);
    CHECK(torch::equal(now->exp_avg(), then->exp_avg()));
    CHECK(torch::equal(now->exp_avg_sq(), then->exp_avg_sq()));
  }
  for (const auto* name : {"embed.weight", "embed.bias", "head.weight"}) {
    const auto* now = state(other, model->named_parameters()[name]);
    CHECK((now != nullptr) == has_state);
    if (now != nullptr) CHECK(now->step() == 1);
  }
}

TEST_CASE("a parameter that is tied here, but was saved as two, takes values and state from its first name",
          "[checkpoint][load_checkpoint]") {
  TemporaryFolder folder;
  struct Two : nn::Module {
    Two(const Tensor& first, const Tensor& second) : a(register_parameter("a", first)), b(register_parameter("b", second)) {}
    Tensor a, b;
  };
  Two saved(torch::ones({2}), torch::full({2}, 5.));
  torch::optim::AdamW optimizer(saved.parameters());
  (saved.a * 2 + saved.b * 3).sum().backward();
  optimizer.step();
  save_checkpoint(folder / "c", {saved, optimizer});

  const auto shared = torch::zeros({2}).requires_grad_();
  Two tied(shared, shared);
  torch::optim::AdamW other({shared});
  const auto loaded = load_checkpoint(folder / "c", {tied, other}, {.strict = false});
  const auto& of_a = static_cast<torch::optim::AdamWParamState&>(*optimizer.state().at(saved.a.unsafeGetTensorImpl()));
  const auto& found = static_cast<torch::optim::AdamWParamState&>(*other.state().at(shared.unsafeGetTensorImpl()));
  CHECK(shared.equal(saved.a));
  CHECK(found.exp_avg().equal(of_a.exp_avg()));
  CHECK_THAT(fmt::format("{}", fmt::join(loaded.misfits.unexpected, ", ")), Catch::Contains("'b.exp_avg'"));
}

TEST_CASE("a parameter that was saved in another group of the optimizer is named, from a dict as from a checkpoint",
          "[checkpoint][load_checkpoint]") {
  TemporaryFolder folder;
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
  const auto group = [](const Tensor& parameter) { return torch::optim::OptimizerParamGroup({parameter}); };
  nn::Linear saved(2, 3), model(2, 3);
  torch::optim::SGD optimizer(Groups{group(saved->weight), group(saved->bias)}, options);
  saved->forward(torch::ones({1, 2})).sum().backward();
  optimizer.step();
  save_checkpoint(folder / "c", {saved, optimizer});
  auto dict = optimizer_state_dict(*saved, optimizer);

  torch::optim::SGD other(Groups{group(model->bias), group(model->weight)}, options);
  CHECK_THROWS_WITH(load_checkpoint(folder / "c", {model, other}),
                    Catch::Contains("'weight' is in the optimizer's group 0, expected 1"));
  dict.groups[1].options["nesterov"] = 1.0;
  CHECK_THROWS_WITH(load_optimizer_state_dict(*model, other, dict),
                    Catch::Contains("'weight' is in parameter group 0, expected 1") &&
                        Catch::Contains("parameter group 1: optimizer option 'nesterov': the value has another type"));
  const auto result = load_optimizer_state_dict(*model, other, dict, {.strict = false});
  CHECK(result.wrong.size() == 3);
  CHECK(other.state().empty());
  const auto loaded = load_checkpoint(folder / "c", {model, other}, {.strict = false});
  CHECK(loaded.misfits.wrong.size() == 2);
  CHECK(other.state().size() == 2);
}

TEST_CASE("an optimizer of another class or with other groups does not fit", "[checkpoint][load_checkpoint]") {
  TemporaryFolder folder;
  auto model = plain_odd();
  torch::optim::AdamW adamw(model->parameters());
  train(model, adamw, 1);
  save_checkpoint(folder / "c", {model, adamw});
  torch::optim::SGD sgd(model->parameters(), 0.1);
  CHECK_THROWS_WITH(load_checkpoint(folder / "c", {model, sgd}), Catch::Contains("AdamW's, expected SGD's"));
  torch::optim::AdamW two_groups({torch::optim::OptimizerParamGroup({model->scale}), torch::optim::OptimizerParamGroup({model->plain})});
  CHECK_THROWS_WITH(load_checkpoint(folder / "c", {model, two_groups}), Catch::Contains("1 parameter groups, expected 2"));
  torch::optim::LBFGS other(model->parameters());
  CHECK_THROWS_AS(save_checkpoint(folder / "c", {model, other}), UsageError);
}

TEST_CASE("values are converted on the way out and in, as LibTorch converts", "[checkpoint][load_checkpoint]") {
  TemporaryFolder folder;
  CHECK(on_ranks(3, [&](Rank& rank) {
    auto model = plain_odd(), plain = plain_odd(), other = plain_odd(99);
    shard_odd(model, rank, {"", 3});
    shard_odd(other, rank, {"", 3});
    save_checkpoint(folder / "c", {model}, {.world = rank.world(), .dtype = at::kBFloat16});
    rank.check_throws<UsageError>([&] { load_checkpoint(folder / "c", {other}, {.world = rank.world()}); },
                                  {"'lin.weight' is BF16, expected F32", "convert_dtypes"}, "not asked for");
    load_checkpoint(folder / "c", {other}, {.world = rank.world(), .convert_dtypes = true});
    const auto expected = plain->named_parameters();
    for (const auto& item : other->named_parameters()) {
      const auto value = expected[item.key()].detach();
      rank.check_identical(is_fsdp_parameter(item.value()) ? full_tensor(item.value()) : item.value().detach(),
                           at::isFloatingType(value.scalar_type()) ? value.to(at::kBFloat16).to(value.scalar_type()) : value,
                           item.key());
    }
  }));
}

TEST_CASE("names are mapped by prefix, and what is mapped to nothing is left out", "[checkpoint][load_checkpoint]") {
  const auto map = map_prefixes({{"model.", ""}, {"model.head.", "lm_head."}, {"x", ""}});
  CHECK(map("model.a") == "a");
  CHECK(map("model.head.b") == "lm_head.b");
  CHECK(map("other") == "other");
  CHECK(map("x").empty());
  TemporaryFolder folder;
  save_checkpoint_parts(folder / "c", {{whole_section({{"model.a", torch::ones({2})}, {"x", torch::ones({3})}})}});
  auto a = torch::zeros({2});
  CheckpointReader(folder / "c", {.rename = map}).load({whole_section({{"a", a}})});
  CHECK(a.equal(torch::ones({2})));
  const auto clash = [](const std::string&) { return "a"; };
  CHECK_THROWS_WITH(CheckpointReader(folder / "c", {.rename = clash}).load({whole_section({{"a", a}})}), Catch::Contains("both renamed"));
}

TEST_CASE("a buffer is the first rank's, in the dtype that it had before a policy cast it", "[checkpoint][load_checkpoint]") {
  TemporaryFolder folder;
  CHECK(on_ranks(2, [&](Rank& rank) {
    auto model = plain_odd();
    model->norm->running_mean.fill_(rank.index() + 1.0);
    shard_odd(model, rank, {"", 2}, {.buffer_dtype = at::kBFloat16});
    save_checkpoint(folder / "c", {model}, {.world = rank.world()});
    CheckpointReader reader(folder / "c", {.world = rank.world(), .strict = false});
    auto mean = torch::zeros({5});
    const auto misfits = reader.load({whole_section({{"norm.running_mean", mean}})});
    rank.check(misfits.wrong.empty(), "float32 in the file");
    rank.check_identical(mean, torch::ones({5}), "the first rank's");
    load_checkpoint(folder / "c", {model}, {.world = rank.world()});
    rank.check(model->norm->running_mean.scalar_type() == at::kBFloat16, "cast still");
    rank.check_identical(model->norm->running_mean.to(at::kFloat), torch::ones({5}), "loaded");
  }));
}

TEST_CASE("random generators go on where they were, at an equal world alone", "[checkpoint][load_checkpoint]") {
  TemporaryFolder folder;
  auto model = plain_odd();
  torch::manual_seed(5);
  save_checkpoint(folder / "c", {model});
  const auto expected = torch::rand({4});
  torch::rand({9});
  CHECK(load_checkpoint(folder / "c", {model}).restored_rng_state);
  CHECK(torch::rand({4}).equal(expected));
  torch::manual_seed(6);
  const auto own = torch::rand({4});
  torch::manual_seed(6);
  CHECK_FALSE(load_checkpoint(folder / "c", {.model = model, .rng_state = false}).restored_rng_state);
  CHECK(torch::rand({4}).equal(own));
}

TEST_CASE("a file that the first rank alone sees is sent on to the others", "[checkpoint][load_checkpoint]") {
  TemporaryFolder folder;
  const auto whole = torch::randn({700, 900});
  save_checkpoint_parts(folder / "c", {{whole_section({{"weight", whole}, {"bias", torch::ones({700})}})}});
  CHECK(on_ranks(3, [&](Rank& rank) {
    nn::Linear linear(900, 700);
    fully_shard(linear, {.mesh = rank.mesh(), .shard_placement_fn = [](const std::string&, const Tensor& parameter) {
                           return Shard{parameter.dim() - 1};
                         }});
    const auto path = (rank.index() == 0 ? folder / "c" : std::string("/nowhere")) + "/model.safetensors";
    rank.check_throws<CheckpointError>([&] {
      auto copy = std::filesystem::path(folder / "gone");
      load_checkpoint(copy, {linear}, {.world = rank.world(), .readers = CheckpointReaders::kFirstRank});
    }, {"rank 0", "no such file"}, "missing");
    load_checkpoint(path, {.model = linear, .rng_state = false},
                    {.world = rank.world(), .readers = CheckpointReaders::kFirstRank, .max_extra_bytes = int64_t{4} << 20});
    rank.check_identical(full_tensor(linear->weight), whole, "weight");
    rank.check_identical(full_tensor(linear->bias), torch::ones({700}), "bias");
  }));
}

TEST_CASE("where the first rank reads, one that cannot take what arrives is an error of all, and no rank waits",
          "[checkpoint][load_checkpoint]") {
  TemporaryFolder folder;
  save_checkpoint_parts(folder / "c", {{whole_section({{"a", torch::ones({8})}, {"b", torch::ones({8})}})}});
  CHECK(on_ranks(2, [&](Rank& rank) {
    // Two elements in one place of memory: it cannot be written.
    auto a = rank.index() == 1 ? torch::zeros({1}).expand({8}) : torch::zeros({8});
    const auto b = torch::zeros({8});
    rank.check_throws<CheckpointError>(
        [&] {
          CheckpointReader(folder / "c", {.world = rank.world(), .readers = CheckpointReaders::kFirstRank})
              .load({whole_section({{"a", a}, {"b", b}})});
        },
        {"rank 1: "}, "an error of rank 1");
  }));
}

}  // namespace
}  // namespace fsdp::test
