#include <catch2/catch.hpp>

#include "support/models.hpp"

// Modules built on the meta device: sharded, then given only this rank's memory and values.

namespace fsdp::test {
namespace {

namespace nn = torch::nn;
using at::Tensor;

template <class Make>
auto on_meta(Make&& make) {
  MetaDevice meta;
  return make();
}

/// A parameter of every kind of rule, frozen and odd-sized ones among them.
struct ZooImpl : nn::Module {
  ZooImpl() {
    embed = register_module("embed", nn::Embedding(nn::EmbeddingOptions(11, 6).padding_idx(2)));
    conv = register_module("conv", nn::Conv1d(6, 5, 3));
    lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(5, 3).num_layers(2)));
    norm = register_module("norm", nn::BatchNorm1d(7));
    attention = register_module("attention", nn::MultiheadAttention(nn::MultiheadAttentionOptions(8, 2).add_bias_kv(true)));
    bilinear = register_module("bilinear", nn::Bilinear(3, 2, 5));
    slope = register_module("slope", nn::PReLU(nn::PReLUOptions().num_parameters(3).init(0.5)));
    head = register_module("head", nn::Linear(nn::LinearOptions(5, 9).bias(false)));
    head->weight.set_requires_grad(false);
  }
  nn::Embedding embed{nullptr};
  nn::Conv1d conv{nullptr};
  nn::LSTM lstm{nullptr};
  nn::BatchNorm1d norm{nullptr};
  nn::MultiheadAttention attention{nullptr};
  nn::Bilinear bilinear{nullptr};
  nn::PReLU slope{nullptr};
  nn::Linear head{nullptr};
};
TORCH_MODULE(Zoo);

/// The same values in every parameter and buffer, by name, bit for bit.
void check_same_values(const Rank& rank, const nn::Module& module, const nn::Module& plain, const std::string& what) {
  const auto expected = unique_parameters(plain);
  const auto found = unique_parameters(module);
  rank.check_equal(found.size(), expected.size(), what + ": number of parameters");
  for (size_t i = 0; i < found.size(); ++i) {
    const auto& [name, parameter] = found[i];
    rank.check_equal(name, expected[i].first, what);
    rank.check(!parameter.is_meta(), what + ": " + name + " has memory");
    const auto whole = is_fsdp_parameter(parameter) ? dtensor_of(parameter).full_tensor() : parameter;
    rank.check_identical(whole.detach(), expected[i].second.detach(), what + ": " + name);
    rank.check_equal(parameter.requires_grad(), expected[i].second.requires_grad(), what + ": requires_grad of " + name);
  }
  const auto buffers = module.named_buffers(), plain_buffers = plain.named_buffers();
  for (const auto& buffer : plain_buffers)
    rank.check_identical(buffers[buffer.key()], buffer.value(), what + ": buffer " + buffer.key());
}

Zoo plain_zoo(const InitOptions& options) {
  auto zoo = seeded(1, [] { return Zoo(); });
  init_parameters(zoo, options);
  return zoo;
}

TEST_CASE("a module on meta gets the same values on any number of ranks and in any groups", "[runtime][materialize]") {
  const auto plain = plain_zoo({.seed = 7});
  for (int world_size = 1; world_size <= 8; ++world_size)
    on_ranks(world_size, [&](Rank& rank) {
      auto zoo = on_meta([] { return Zoo(); });
      const FullyShardOptions options{.mesh = rank.mesh()};
      if (world_size % 2 == 0) fully_shard(zoo->attention, options);
      if (world_size % 3 == 0) fully_shard(zoo->lstm, options);
      fully_shard(zoo, options);
      rank.log().clear();
      materialize(zoo, {.seed = 7});
      rank.check(rank.calls().empty(), "nothing is communicated");
      check_same_values(rank, *zoo, *plain, fmt::format("{} ranks", world_size));
    });
  for (const auto& [replicas, shards] : {std::pair(2, 2), std::pair(2, 3), std::pair(3, 1)})
    on_ranks(replicas * shards, [&](Rank& rank) {
      auto zoo = on_meta([] { return Zoo(); });
      fully_shard(zoo, {.mesh = rank.hybrid(replicas, shards)});
      materialize(zoo, {.seed = 7});
      check_same_values(rank, *zoo, *plain, "HSDP");
    });
  on_ranks(2, [&](Rank& rank) {
    auto zoo = on_meta([] { return Zoo(); });
    fully_shard(zoo, {.mesh = rank.mesh(), .replicate_only = true});
    materialize(zoo, {.seed = 7});
    check_same_values(rank, *zoo, *plain, "replicated");
  });
  auto unsharded = on_meta([] { return Zoo(); });
  materialize(unsharded, {.seed = 7});
  on_ranks(1, [&](Rank& rank) { check_same_values(rank, *unsharded, *plain, "not sharded at all"); });
}

TEST_CASE("only this rank's part gets memory", "[runtime][materialize]") {
  on_ranks(4, [](Rank& rank) {
    auto model = on_meta([] { return nn::Linear(64, 64); });
    auto root = fully_shard(model, {.mesh = rank.mesh()});
    materialize(model);
    rank.check_equal(parameter_bytes(root).sharded, int64_t{(64 * 64 + 64) / 4 * 4}, "a quarter of it");
    rank.check_equal(parameter_bytes(root).peak_unsharded, int64_t{0}, "and never more");
  });
}

TEST_CASE("the seed and the name decide, the dtype only rounds", "[runtime][materialize]") {
  auto values = [](uint64_t seed, at::ScalarType dtype) {
    Chain chain(2, 6);
    chain->to(dtype);
    init_parameters(chain, {.seed = seed});
    return chain;
  };
  const auto first = values(3, at::kFloat), again = values(3, at::kFloat), other = values(4, at::kFloat);
  CHECK(first->layers[0]->weight.equal(again->layers[0]->weight));
  CHECK(!first->layers[0]->weight.equal(other->layers[0]->weight));
  CHECK(!first->layers[0]->weight.equal(first->layers[1]->weight));
  const auto exact = values(3, at::kDouble), rounded = values(3, at::kBFloat16);
  CHECK(exact->layers[0]->weight.to(at::kFloat).equal(first->layers[0]->weight));
  CHECK(first->layers[0]->weight.to(at::kBFloat16).equal(rounded->layers[0]->weight));
}

TEST_CASE("the padding row of an embedding is zero, and only that", "[runtime][materialize]") {
  on_ranks(3, [](Rank& rank) {
    auto embed = on_meta([] { return nn::Embedding(nn::EmbeddingOptions(10, 3).padding_idx(6)); });
    auto bag = on_meta([] { return nn::EmbeddingBag(nn::EmbeddingBagOptions(10, 3).padding_idx(0)); });
    using Case = std::tuple<std::shared_ptr<nn::Module>, Tensor, int>;
    for (const auto& [module, weight, row] : {Case(embed.ptr(), embed->weight, 6), Case(bag.ptr(), bag->weight, 0)}) {
      fully_shard(*module, {.mesh = rank.mesh()});
      materialize(*module);
      const auto is_zero = (weight.detach() == 0).all(1);
      rank.check_equal(is_zero.sum().item<int64_t>(), int64_t{1}, "zero rows");
      rank.check(is_zero[row].item<bool>(), "the padding row");
    }
  });
}

/// Uses every initialiser that LibTorch's classes do not.
struct ManyImpl : nn::Module {
  ManyImpl() {
    for (const auto& [name, sizes] : shapes()) register_parameter(name, torch::zeros(sizes));
    table = register_buffer("table", torch::zeros({4, 3}));
  }
  static std::vector<std::pair<std::string, std::vector<int64_t>>> shapes() {
    return {{"tall", {9, 4}}, {"wide", {3, 2, 5}}, {"sparse", {10, 7}}, {"eye", {5, 6}}, {"dirac", {4, 3, 3, 5}},
            {"whole", {7, 2}}, {"known", {5, 3}}, {"each", {13}}, {"kaiming", {6, 4}}, {"xavier", {6, 4}}, {"scalar", {}}};
  }
  Tensor table;
};
TORCH_MODULE(Many);

InitOptions rules_for_many() {
  auto fill = [](ManyImpl& module, Initializer& init) {
    auto entries = module.named_parameters(false);
    init.orthogonal_(entries["tall"], 2);
    init.orthogonal_(entries["wide"]);
    init.sparse_(entries["sparse"], 0.35);
    init.eye_(entries["eye"]);
    init.dirac_(entries["dirac"]);
    init.whole_(entries["whole"], [](Tensor& whole, at::Generator generator) { whole.exponential_(1, generator); });
    init.copy_(entries["known"], torch::arange(15.F).view({5, 3}));
    init.elementwise_(entries["each"], [](int64_t element, ElementRandom& random) {
      return static_cast<double>(element) + random.uniform() / 2;
    });
    init.fill_range_(entries["each"], {4, 9}, -1);
    init.kaiming_normal_(entries["kaiming"], 0, torch::kFanOut, torch::kReLU);
    init.xavier_normal_(entries["xavier"], 3);
    init.constant_(entries["scalar"], 2.5);
    init.copy_(module.table, torch::ones({4, 3}));
  };
  return {.seed = 9, .initializers = {initializer<Many>(fill)}};
}

TEST_CASE("initialisers that need the whole parameter give every rank its part of the same one", "[runtime][materialize]") {
  Many plain;
  init_parameters(plain, rules_for_many());
  for (int world_size = 1; world_size <= 8; ++world_size)
    on_ranks(world_size, [&](Rank& rank) {
      auto many = on_meta([] { return Many(); });
      fully_shard(many, {.mesh = rank.mesh()});
      materialize(many, rules_for_many());
      check_same_values(rank, *many, *plain, fmt::format("{} ranks", world_size));
    });
  const auto value = plain->named_parameters();
  const auto square = [](const Tensor& rows) { return rows.mm(rows.t()).detach(); };
  CHECK(at::allclose(square(value["tall"].t()), 4 * torch::eye(4), 1e-5, 1e-5));
  CHECK(at::allclose(square(value["wide"].reshape({3, 10})), torch::eye(3), 1e-5, 1e-5));
  CHECK((value["sparse"] == 0).sum(0).equal(torch::full({7}, 4)));  // ceil(0.35 * 10) a column
  CHECK(value["eye"].equal(nn::init::eye_(torch::zeros({5, 6}))));
  CHECK(value["dirac"].equal(nn::init::dirac_(torch::zeros({4, 3, 3, 5}))));
  CHECK((value["whole"] > 0).all().item<bool>());
  CHECK((value["each"].narrow(0, 4, 5) == -1).all().item<bool>());
  CHECK(value["each"].floor().narrow(0, 9, 4).equal(torch::arange(9.F, 13.F)));
}

struct OwnImpl : nn::Module {
  OwnImpl() {
    scale = register_parameter("scale", torch::ones({6}));
    shift = register_parameter("shift", torch::ones({6}));
    table = register_buffer("table", torch::ones({4}));
  }
  Tensor scale, shift, table;
};

struct WithOwnImpl : nn::Module {
  WithOwnImpl() {
    first = register_module("first", std::make_shared<OwnImpl>());
    second = register_module("second", std::make_shared<OwnImpl>());
    linear = register_module("linear", nn::Linear(3, 3));
    list = register_module("list", nn::ParameterList());
    list->append(torch::ones({3}));
  }
  std::shared_ptr<OwnImpl> first, second;
  nn::Linear linear{nullptr};
  nn::ParameterList list;
};
TORCH_MODULE(WithOwn);

TEST_CASE("modules that nothing covers are listed together, before anything has memory", "[runtime][materialize]") {
  on_ranks(2, [](Rank& rank) {
    auto model = on_meta([] { return WithOwn(); });
    fully_shard(model, {.mesh = rank.mesh()});
    const auto still_meta = [&](const std::string& what) {
      for (auto& parameter : model->parameters()) rank.check(parameter.is_meta(), what + ": parameters stay on meta");
      for (auto& buffer : model->buffers()) rank.check(buffer.is_meta(), what + ": buffers stay on meta");
    };
    rank.check_throws<UsageError>([&] { materialize(model); },
                                  {"'first'", "OwnImpl", "scale, shift, buffer table", "'second'", "'list'", "initializer"}, "unknown classes");
    still_meta("unknown classes");
    const auto partial = initializer<OwnImpl>([](OwnImpl& own, Initializer& init) { init.ones_(own.scale); });
    rank.check_throws<UsageError>([&] { materialize(model, {.initializers = {partial}}); },
                                  {"'first'", "shift, buffer table", "'list'"}, "a rule that leaves something out");
    still_meta("a rule that leaves something out");
    const auto foreign = initializer<OwnImpl>([](OwnImpl&, Initializer& init) { init.ones_(torch::ones({3})); });
    rank.check_throws<UsageError>([&] { materialize(model, {.initializers = {foreign}}); }, {"no parameter"}, "a foreign tensor");
    still_meta("a foreign tensor");

    const auto own = initializer<OwnImpl>([](OwnImpl& own, Initializer& init) {
      init.constant_(own.scale, 2);
      init.zeros_(own.shift);
      init.copy_(own.table, torch::arange(4.F));
    });
    // An outer class may cover what it holds, and overrule what inner ones do.
    const auto outer = initializer<WithOwn>([](WithOwnImpl& outer, Initializer& init) {
      for (const auto& parameter : outer.list->parameters()) init.ones_(parameter);
      init.constant_(outer.second->scale, 3);
    });
    materialize(model, {.initializers = {own, outer}});
    rank.check_identical(model->first->scale.detach().clone(), torch::full({6}, 2.F), "a registered class");
    rank.check_identical(model->second->scale.detach().clone(), torch::full({6}, 3.F), "overruled");
    rank.check_identical(model->first->table, torch::arange(4.F), "a buffer");
    rank.check_identical(dtensor_of(model->list->parameters()[0]).full_tensor(), torch::ones({3}), "a list's entry");
  });
}

TEST_CASE("what an initializer throws names its module, and keeps its kind where that can be", "[runtime][materialize]") {
  struct OwnError : std::logic_error {
    using std::logic_error::logic_error;
  };
  CHECK(on_ranks(2, [](Rank& rank) {
    struct OuterImpl : nn::Module {
      nn::Sequential inner = register_module("inner", nn::Sequential(nn::Tanh(), nn::Linear(3, 3)));
    };
    auto model = on_meta([] { return std::make_shared<OuterImpl>(); });
    fully_shard(*model, {.mesh = rank.mesh()});
    auto run = [&](std::function<void(nn::LinearImpl&, Initializer&)> function) {
      return [&model, function] { materialize(*model, {.initializers = {initializer<nn::Linear>(function)}}); };
    };
    const std::string module = "the initializer of 'inner.1' (torch::nn::LinearImpl)";
    rank.check_throws<UsageError>(run([](auto&, auto&) { throw OwnError("no"); }), {module, ": no"}, "the program's own");
    rank.check_throws<UsageError>(run([](auto& linear, auto& init) { init.eye_(linear.bias); }), {module, "eye_ needs a matrix"}, "ours");
    rank.check_throws<c10::Error>(run([](auto&, auto&) { TORCH_CHECK(false, "out of range"); }), {module, "out of range"}, "LibTorch's");
    try {
      run([](auto&, auto&) { throw OwnError("no"); })();
    } catch (const UsageError& error) {
      rank.check_throws<OwnError>([&] { std::rethrow_if_nested(error); }, {"no"}, "nested");
    }
    rank.check(model->parameters()[0].is_meta(), "nothing has changed");
  }));
}

TEST_CASE("an optimizer built before materialisation trains the model like any other", "[runtime][materialize]") {
  for (int world_size : {1, 2, 3})
    on_ranks(world_size, [](Rank& rank) {
      auto plain = plain_chain();
      init_parameters(plain, {.seed = 21});
      auto model = on_meta([] { return Chain(3, 6); });
      for (auto& layer : model->layers) fully_shard(layer, {.mesh = rank.mesh()});
      fully_shard(model, {.mesh = rank.mesh()});
      const auto before = model->parameters();
      const auto weight = model->layers[0]->weight;
      torch::optim::AdamW optimizer(model->parameters(), 1e-2), plain_optimizer(plain->parameters(), 1e-2);
      materialize(model, {.seed = 21});
      const auto after = model->parameters();
      for (size_t i = 0; i < after.size(); ++i) rank.check(after[i].is_same(before[i]), "the same sharded tensors");
      rank.check(weight.is_same(model->layers[0]->weight) && !weight.is_meta(), "the same member");
      for (int step = 0; step < 3; ++step) {
        const auto gradients = averaged_gradients(plain, rank.size(), step);
        for (size_t i = 0; i < gradients.size(); ++i) plain->parameters()[i].mutable_grad() = gradients[i].second;
        optimizer.zero_grad();
        Inputs inputs(rank.index(), step);
        model->forward(inputs.normal({4, 6})).square().mean().backward();
        check_gradients(rank, *model, gradients, fmt::format("step {}", step));
        optimizer.step();
        plain_optimizer.step();
      }
    });
}

TEST_CASE("a mixed-precision group on meta computes like one with values from the start", "[runtime][materialize]") {
  on_ranks(2, [](Rank& rank) {
    const FullyShardOptions options{.mesh = rank.mesh(), .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}};
    auto late = on_meta([] { return Chain(2, 6); }), early = Chain(2, 6);
    init_parameters(early, {.seed = 2});
    fully_shard(late, options);
    fully_shard(early, options);
    materialize(late, {.seed = 2});
    rank.check(late->head->weight.scalar_type() == at::kBFloat16, "the unsharded parameter's dtype");
    Inputs inputs(rank.index(), 0);
    const auto x = inputs.normal({4, 6});
    for (auto& model : {late, early}) {
      Chain net = model;
      net->forward(x).sum().backward();
    }
    rank.check_identical(late->forward(x).detach(), early->forward(x).detach(), "forward");
    for (size_t i = 0; i < late->parameters().size(); ++i)
      rank.check_identical(late->parameters()[i].grad(), early->parameters()[i].grad(), "a gradient");
  });
}

TEST_CASE("what has values keeps them, and a part of a group is refused", "[runtime][materialize]") {
  on_ranks(2, [](Rank& rank) {
    auto model = seeded(5, [] { return Chain(2, 6); });
    const auto weight = model->layers[0]->weight.detach().clone();
    to(*model->layers[1], at::kMeta);
    rank.check(model->layers[1]->weight.is_meta(), "one layer on meta");
    for (auto& layer : model->layers) fully_shard(layer, {.mesh = rank.mesh()});
    fully_shard(model, {.mesh = rank.mesh()});
    rank.check_throws<UsageError>([&] { materialize(model->head); }, {"head.weight", "fsdp::materialize"}, "a part of the root's group");
    materialize(model, {.seed = 4});
    rank.check_identical(model->layers[0]->weight.detach().clone(), weight, "a layer that had values");
    nn::Linear expected(6, 6);
    struct Holder : nn::Module {};
    Holder holder;
    holder.register_module("layer1", expected);
    init_parameters(holder, {.seed = 4});
    rank.check_identical(model->layers[1]->weight.detach().clone(), expected->weight.detach(), "the one that had not");
  });
}

TEST_CASE("memory without values is zeros, for values from elsewhere", "[runtime][materialize]") {
  on_ranks(3, [](Rank& rank) {
    auto model = on_meta([] { return Zoo(); });
    fully_shard(model, {.mesh = rank.mesh()});
    rank.check_throws<UsageError>([&] { init_parameters(model); }, {"meta", "materialize"}, "values without memory");
    to_empty(model);
    for (auto& parameter : model->parameters()) rank.check_identical(parameter.detach(), torch::zeros_like(parameter), "zeros");
    rank.check(!model->norm->running_var.is_meta(), "buffers too");
    init_parameters(model, {.seed = 7});
    check_same_values(rank, *model, *plain_zoo({.seed = 7}), "then values");
  });
}

TEST_CASE("a use before materialisation says what to do, at one rank too", "[runtime][materialize]") {
  for (int world_size : {1, 2})
    on_ranks(world_size, [](Rank& rank) {
      auto model = on_meta([] { return nn::Linear(4, 4); });
      fully_shard(model, {.mesh = rank.mesh()});
      rank.check_throws<StateError>([&] { model->forward(torch::ones({1, 4})); }, {"meta", "fsdp::materialize"}, "forward");
      materialize(model);
      model->forward(torch::ones({1, 4})).sum().backward();
      rank.check(model->parameters()[0].grad().defined(), "afterwards it works");
    });
}

TEST_CASE("tensors made while MetaDevice lives are on meta where nobody says otherwise", "[runtime][materialize]") {
  const auto real = torch::ones({2});
  {
    MetaDevice meta;
    CHECK(torch::zeros({3}).is_meta());
    CHECK(torch::randn({1000, 1000, 1000}).is_meta());  // 4 GB if it were real
    CHECK(torch::arange(5).is_meta());
    CHECK(!torch::zeros({3}, at::kCPU).is_meta());
    CHECK(!torch::zeros_like(real).is_meta());
    CHECK(!real.to(at::kDouble).is_meta());
    CHECK(!torch::tensor({1.0, 2.0}).is_meta());
    {
      MetaDevice nested;
      CHECK(torch::empty({1}).is_meta());
    }
    CHECK(torch::empty({1}).is_meta());
    CHECK(torch::ones({2}, torch::requires_grad()).requires_grad());
  }
  CHECK(!torch::zeros({3}).is_meta());
}

}  // namespace
}  // namespace fsdp::test
