#include <catch2/catch.hpp>

#include <sstream>

#include "support/models.hpp"
#include "support/odd_model.hpp"
#include "support/sample.hpp"
#include "support/scoped_environment.hpp"

// One parameter that modules of several groups register.
namespace fsdp::test {
namespace {

namespace nn = torch::nn;

/// The embedding's weight is the output layer's too; each is in a block of its own, with parameters of its own.
struct InputImpl : nn::Module {
  InputImpl(int64_t words, int64_t width) {
    table = register_module("table", nn::Embedding(words, width));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})));
  }
  at::Tensor forward(const at::Tensor& words) { return norm->forward(table->forward(words)); }
  nn::Embedding table{nullptr};
  nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Input);

struct OutputImpl : nn::Module {
  OutputImpl(const at::Tensor& weight, int64_t width) : tied(weight) {
    mix = register_module("mix", nn::Linear(width, width));
    register_parameter("tied", weight);
  }
  at::Tensor forward(const at::Tensor& x) { return torch::matmul(mix->forward(x), tied.t()); }
  nn::Linear mix{nullptr};
  at::Tensor tied;
};
TORCH_MODULE(Output);

struct TiedNetImpl : nn::Module {
  explicit TiedNetImpl(int64_t words = 7, int64_t width = 6) : words(words) {
    input = register_module("input", Input(words, width));
    between = register_module("between", nn::Linear(width, width));
    output = register_module("output", Output(input->table->weight, width));
    last = register_module("last", nn::Linear(words, 3));
  }
  at::Tensor forward(const at::Tensor& in) {
    return last->forward(output->forward(torch::tanh(between->forward(input->forward(in)))));
  }
  int64_t words;
  Input input{nullptr};
  nn::Linear between{nullptr}, last{nullptr};
  Output output{nullptr};
};
TORCH_MODULE(TiedNet);

/// Which modules are sharded, inner ones first.
enum class Units { kBlocks, kOutputFirst, kInputAndRoot, kOutputAndRoot, kOneList };

Workload tied_workload(Units units = Units::kBlocks) {
  TiedNet model;
  return {.module = model.ptr(),
          .shard =
              [model, units](const FullyShardOptions& options) {
                if (units == Units::kOneList) {
                  fully_shard({model->input.ptr(), model->output.ptr()}, options);
                } else {
                  if (units == Units::kOutputFirst) fully_shard(model->output, options);
                  if (units != Units::kOutputAndRoot) fully_shard(model->input, options);
                  if (units == Units::kBlocks || units == Units::kOutputAndRoot) fully_shard(model->output, options);
                  fully_shard(model->between, options);
                }
                fully_shard(model, options);
              },
          .loss = [model](Inputs& in) mutable {
            return model->forward(in.integers(model->words, {2, 5})).square().mean();
          }};
}

constexpr auto kUnits = {Units::kBlocks, Units::kOutputFirst, Units::kInputAndRoot, Units::kOutputAndRoot,
                         Units::kOneList};

TEST_CASE("a parameter tied across groups trains like the plain one", "[runtime][ties]") {
  Sample sample(2);
  for (const auto units : kUnits)
    for (const int world : {1, 2, 3, 4})
      if (sample.takes_next())
        CHECK(trains_like_plain([=] { return tied_workload(units); }, {.world_size = world, .max_norm = 0.7}));
}

TEST_CASE("ties across groups hold on hybrid meshes, with accumulation and integer reshard", "[runtime][ties]") {
  const std::vector<Training> ways = {
      {.world_size = 4, .replicas = 2, .micro_batches = 2, .accumulation = Accumulation::kAllReduceLast},
      {.world_size = 4, .micro_batches = 2, .accumulation = Accumulation::kSyncAtLast, .reshard_after_forward = 2},
      {.world_size = 2, .replicate_only = true},
      {.world_size = 3, .dtype = at::kDouble, .budget_factor = 1.5}};
  Sample sample(2);
  for (const auto units : kUnits)
    for (const auto& way : ways)
      if (sample.takes_next()) CHECK(trains_like_plain([=] { return tied_workload(units); }, way));
}

TEST_CASE("ties across groups hold in every layout", "[runtime][ties]") {
  const auto flat = [](FullyShardOptions& options) { options.layout = ParamLayout::kFlat; };
  const auto columns = [](FullyShardOptions& options) {
    options.shard_placement_fn = [](const std::string&, const at::Tensor& parameter) {
      return Shard{parameter.dim() - 1};
    };
  };
  // By a name that differs from unit to unit: the tensor keeps the rows that it has.
  const auto by_name = [](FullyShardOptions& options) {
    options.shard_placement_fn = [](const std::string& name, const at::Tensor& parameter) {
      return Shard{name == "tied" ? parameter.dim() - 1 : 0};
    };
  };
  Sample sample(2);
  for (const auto units : kUnits)
    for (const auto& adjust : std::vector<std::function<void(FullyShardOptions&)>>{flat, columns, by_name})
      for (const int world : {1, 2, 3})
        if (sample.takes_next())
          CHECK(trains_like_plain([=] { return tied_workload(units); }, {.world_size = world, .adjust = adjust}));
}

TEST_CASE("a tied parameter may come from a group of another layout", "[runtime][ties]") {
  for (const bool is_inner_flat : {false, true})
    for (const int world : {1, 2, 3}) {
      const auto make = [=] {
        TiedNet model;
        return Workload{.module = model.ptr(),
                        .shard =
                            [=](const FullyShardOptions& given) {
                              auto flat = given;
                              flat.layout = ParamLayout::kFlat;
                              fully_shard(model->input, is_inner_flat ? flat : given);
                              fully_shard(model->output, is_inner_flat ? flat : given);
                              fully_shard(model, is_inner_flat ? given : flat);
                            },
                        .loss = [=](Inputs& in) mutable {
                          return model->forward(in.integers(model->words, {2, 5})).square().mean();
                        }};
      };
      CHECK(trains_like_plain(make, {.world_size = world}));
    }
}

TEST_CASE("the nearest sharded module around all places owns a tied parameter", "[runtime][ties]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto model = seeded(3, [] { return TiedNet(); });
    nn::Sequential around(nn::Identity{}, nn::AnyModule(model));
    const auto before = model->input->table->weight.detach().clone();
    const FullyShardOptions options{.mesh = rank.mesh()};
    auto input = fully_shard(model->input, options);
    const auto registered = model->input->table->named_parameters()["weight"];
    auto output = fully_shard(model->output, options);
    const int64_t inner_bytes = report(input).bytes.sharded;
    auto middle = fully_shard(model, options);
    auto root = fully_shard(around, options);

    // 7 x 6 floats over 2 ranks are 4 rows of 24 bytes on each
    rank.check_equal(report(root).groups[2].parameters, size_t{2}, "the norm stays with the input");
    rank.check(report(root).groups[2].sharded_bytes <= inner_bytes - 96, "and its group is smaller");
    input.unshard();
    rank.check(!middle.is_unsharded(), "the input's own group only");
    middle.unshard();
    rank.check_identical(model->input->table->weight.detach(), before, "gathered with the middle");
    root.reshard(), middle.reshard(), input.reshard();

    rank.check(model->input->table->named_parameters()["weight"].is_same(registered),
               "the tensor that an optimizer may know already stays");
    std::vector<std::string> names;
    for (const auto& parameter : around->named_parameters()) names.push_back(parameter.key());
    rank.check_equal(std::count(names.begin(), names.end(), "1.input.table.weight"), std::ptrdiff_t{1},
                     "listed under its first name");
    rank.check_equal(std::count(names.begin(), names.end(), "1.output.tied"), std::ptrdiff_t{1}, "and under its other one");
    rank.check_identical(full_tensor(registered), before, "its values are what they were");

    const auto saved = state_dict(*around);
    rank.check(saved.entries.contains("1.input.table.weight") && !saved.entries.contains("1.output.tied"),
               "saved once");
    rank.check_equal(saved.other_names.at("1.output.tied"), std::string("1.input.table.weight"), "its other name too");
    around->forward<at::Tensor>(torch::ones({1, 2}, at::kLong)).sum().backward();
    rank.check(registered.grad().defined(), "its gradient arrives on it");
    rank.check_equal(statistics(root).reductions, int64_t{3}, "input, output and middle, reduced once each");
  }));
}

TEST_CASE("a tie that no sharded module settles is an error at the first use", "[runtime][ties]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto model = seeded(3, [] { return TiedNet(); });
    const FullyShardOptions options{.mesh = rank.mesh()};
    fully_shard(model->input, options);
    fully_shard(model->output, options);
    const auto words = torch::ones({1, 2}, at::kLong);
    rank.check_throws<StateError>([&] { model->input->forward(words); }, {"table.weight", "'tied'", "around"},
                                  "by the module that holds it");
    rank.check_throws<StateError>([&] { model->output->forward(torch::ones({1, 6})); }, {"table.weight", "'tied'"},
                                  "by the other one");
    fully_shard(model, options);
    model->forward(words).sum().backward();
    rank.check(model->parameters()[0].grad().defined(), "settled");
  }));
}

TEST_CASE("mixed precision keeps a tied parameter's own values", "[runtime][ties]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto model = seeded(3, [] { return TiedNet(); });
    const auto before = model->input->table->weight.detach().clone();
    const FullyShardOptions options{.mesh = rank.mesh(), .mp_policy = {.param_dtype = at::kBFloat16}};
    fully_shard(model->input, options);
    fully_shard(model->output, options);
    fully_shard(model, options);
    rank.check_identical(full_tensor(model->input->table->weight), before, "not rounded on the way");
    rank.check(model->output->tied.scalar_type() == at::kBFloat16, "the unsharded parameter has the gathered dtype");
    model->forward(torch::ones({1, 2}, at::kLong)).sum().backward();
    rank.check(sharded(model->output->tied).grad().scalar_type() == at::kFloat, "reduced to its own dtype");
  }));
}

TEST_CASE("a gradient that a tied parameter has already goes with it", "[runtime][ties]") {
  for (const bool is_flat : {false, true})
    CHECK(on_ranks(3, [=](Rank& rank) {
      auto model = seeded(3, [] { return TiedNet(); });
      model->forward(torch::ones({1, 2}, at::kLong)).sum().backward();
      const auto gradient = model->input->table->weight.grad().clone();
      FullyShardOptions options{.mesh = rank.mesh()};
      fully_shard(model->input, options);
      fully_shard(model->output, options);
      if (is_flat) options.layout = ParamLayout::kFlat;
      fully_shard(model, options);
      rank.check_identical(full_grad(model->output->tied), gradient, "whole it is what it was");
    }));
}

TEST_CASE("a model with ties across groups can be copied, converted and shown whole", "[runtime][ties]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto model = seeded(3, [] { return TiedNet(); });
    const auto before = model->input->table->weight.detach().clone();
    const FullyShardOptions options{.mesh = rank.mesh()};
    fully_shard(model->input, options);
    fully_shard(model->output, options);
    auto root = fully_shard(model, options);
    {
      FullParameters scope(*model);
      rank.check_identical(model->output->tied.detach(), before, "shown whole");
      at::NoGradGuard no_grad;
      model->output->tied.mul_(2);
    }
    rank.check_identical(full_tensor(model->input->table->weight), before * 2, "a write reaches the shards");
    fsdp::to(*model, at::kDouble);
    rank.check_identical(full_tensor(model->output->tied), (before * 2).to(at::kDouble), "converted");
    const auto loss = model->forward(torch::ones({1, 2}, at::kLong)).sum();
    loss.backward();
    rank.check(sharded(model->output->tied).grad().scalar_type() == at::kDouble, "and trains");
  }));
}

TEST_CASE("a copy of a model with ties across groups is sharded and tied like it", "[runtime][ties]") {
  for (const bool is_head_first : {false, true})
    for (const auto layout : {ParamLayout::kPerParameter, ParamLayout::kFlat})
      CHECK(on_ranks(3, [=](Rank& rank) {
        auto model = plain_odd();
        const FullyShardOptions options{.mesh = rank.mesh(), .layout = layout};
        if (is_head_first) fully_shard(model->head, options);
        fully_shard(model->embed, options);
        if (!is_head_first) fully_shard(model->head, options);
        fully_shard(model, options);
        auto copy = Odd(clone(model));  // ties may have to be cut anew together
        rank.check(copy->embed->weight.is_same(copy->head->weight), "tied");
        rank.check_equal(find_fsdp_module(*copy)->sharded_modules().size(), size_t{3}, "as many units");
        const auto parameters = unique_parameters(*model), copies = unique_parameters(*copy);
        rank.check_equal(copies.size(), parameters.size(), "as many parameters");
        for (size_t i = 0; i < std::min(copies.size(), parameters.size()); ++i) {
          rank.check_equal(copies[i].first, parameters[i].first, "name of a parameter");
          rank.check_identical(full_tensor(copies[i].second), full_tensor(parameters[i].second), copies[i].first);
        }
        for (auto* net : {&model, &copy}) {
          (*net)->eval();
          Inputs in(rank.index(), 0);
          (*net)->loss(in).backward();
        }
        for (size_t i = 0; i < std::min(copies.size(), parameters.size()); ++i)
          rank.check_close(full_grad(copies[i].second), full_grad(parameters[i].second), copies[i].first + ": gradient");
      }));
}

TEST_CASE("a model on meta with ties across groups is materialised once for each", "[runtime][ties]") {
  const auto make = [] {
    MetaDevice meta;
    return TiedNet();
  };
  at::Tensor alone;
  for (const int world : {1, 3})
    CHECK(on_ranks(world, [&](Rank& rank) {
      auto model = make();
      const FullyShardOptions options{.mesh = rank.mesh()};
      fully_shard(model->input, options);
      fully_shard(model->output, options);
      fully_shard(model, options);
      materialize(*model, {.seed = 4});
      const auto values = full_tensor(model->output->tied);
      if (world == 1)
        alone = values;
      else
        rank.check_identical(values, alone, "the same at any number of ranks");
      model->forward(torch::ones({1, 2}, at::kLong)).sum().backward();
      rank.check(sharded(model->output->tied).grad().defined(), "and the model trains");
    }));
}

/// Weights that are registered a second time, as spectral norm does: one below a sharded module, one within the root's group.
struct TwiceImpl : nn::Module {
  TwiceImpl() {
    first = register_module("first", nn::Linear(4, 7));
    last = register_module("last", nn::Linear(7, 3));
    across = register_parameter("across", first->weight);
    within = register_parameter("within", last->weight);
  }
  at::Tensor forward(const at::Tensor& x) { return last(torch::tanh(first(x))) * within.square().mean(); }
  nn::Linear first{nullptr}, last{nullptr};
  at::Tensor across, within;
};
TORCH_MODULE(Twice);

template <class Optimizer>
void train_twice(Twice& net, Optimizer& optimizer) {
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    net->forward(torch::full({2, 4}, 0.3 + step)).square().mean().backward();
    torch::nn::utils::clip_grad_norm_(net->parameters(), 0.5);
    optimizer.step();
  }
}

void check_same_names(const Rank& rank, Twice& net, Twice& plain, const std::string& what) {
  const auto found = net->named_parameters(), expected = plain->named_parameters();
  rank.check_equal(found.keys(), expected.keys(), what + ": names");
  for (const auto& name : expected.keys()) {
    const auto tensor = found.find(name) != nullptr ? found[name] : at::Tensor();
    rank.check_close(is_fsdp_parameter(tensor) ? full_tensor(tensor) : tensor, expected[name], what + ": " + name);
  }
}

TEST_CASE("a parameter that is registered twice has both names, and is stepped as often as in the plain module", "[runtime][ties]") {
  const auto make = [] { return seeded(3, [] { return Twice(); }); };
  for (const int world : {1, 2})
    CHECK(on_ranks(world, [&](Rank& rank) {
      for (const bool is_adam : {false, true}) {
        auto plain = make(), net = make();
        fully_shard(net->first, {.mesh = rank.mesh()});
        fully_shard(net, {.mesh = rank.mesh()});
        const auto optimizer = [&](Twice& of) -> std::unique_ptr<torch::optim::Optimizer> {
          if (is_adam) return std::make_unique<torch::optim::AdamW>(of->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
          return std::make_unique<torch::optim::SGD>(of->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        };
        const auto of_plain = optimizer(plain), of_net = optimizer(net);
        train_twice(plain, *of_plain);
        train_twice(net, *of_net);
        check_same_names(rank, net, plain, is_adam ? "AdamW" : "SGD");

        std::stringstream file, back;
        torch::save(net, file);
        auto loaded = make();
        torch::load(loaded, file);
        check_same_names(rank, loaded, plain, "loaded into the plain one");
        rank.check(loaded->first->weight.is_same(loaded->across), "still one tensor there");
        torch::save(make(), back);
        torch::load(net, back);
        auto fresh = make();
        check_same_names(rank, net, fresh, "and the reverse");
      }
    }));
}

TEST_CASE("the state of an optimizer that steps a parameter under two names goes by name and by position", "[runtime][ties]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto net = seeded(3, [] { return Twice(); });
    fully_shard(net, {.mesh = rank.mesh()});
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.02));
    train_twice(net, optimizer);
    const auto by_name = optimizer_state_dict(*net, optimizer);
    rank.check_equal(by_name.groups[0].params.size(), size_t{4}, "each name once");
    const auto by_position = optimizer_state_dict(*net, optimizer, {.keys = OptimizerKeys::kPosition});
    rank.check_equal(by_position.groups[0].params.size(), size_t{6}, "each place");
    const auto to_position = rekey(by_name, OptimizerKeys::kPosition, *net, optimizer);
    rank.check_equal(to_position.groups[0].params, by_position.groups[0].params, "to positions");
    rank.check_equal(rekey(by_position, OptimizerKeys::kName, *net, optimizer).groups[0].params, by_name.groups[0].params, "to names");
    torch::optim::AdamW other(net->parameters(), torch::optim::AdamWOptions(0.02));
    for (const auto& dict : {by_name, by_position, to_position}) {
      load_optimizer_state_dict(*net, other, dict);
      rank.check_equal(other.state().size(), size_t{4}, "one state for each tensor");
    }
  }));
}

/// An embedding, and an output layer that is to have its weight.
struct DecoderImpl : nn::Module {
  DecoderImpl() {
    embed = register_module("embed", nn::Embedding(7, 4));
    head = register_module("head", nn::Linear(nn::LinearOptions(4, 7).bias(false)));
  }
  at::Tensor forward(const at::Tensor& words) { return head(embed(words)).square().mean(); }
  nn::Embedding embed{nullptr};
  nn::Linear head{nullptr};
};
TORCH_MODULE(Decoder);

TEST_CASE("two parameters over one memory are refused by name, before anything changes; on one rank they stay as they are",
          "[runtime][ties]") {
  const auto words = torch::tensor({1, 5, 2}, at::kLong);
  const auto tied = [] {
    auto net = seeded(3, [] { return Decoder(); });
    net->head->weight.set_data(net->embed->weight.data());
    return net;
  };
  CHECK(on_ranks(2, [&](Rank& rank) {
    auto net = tied();
    rank.check_throws<UsageError>([&] { fully_shard(net, {.mesh = rank.mesh()}); },
                                  {"'embed.weight' and 'head.weight' show the same memory", "one tensor", "clone"}, "tied");
    rank.check(!find_fsdp_module(*net) && !is_fsdp_parameter(net->parameters()[0]), "nothing has changed");
    net->forward(words).backward();
    fully_shard(net->embed, {.mesh = rank.mesh()});
    rank.check_throws<UsageError>([&] { fully_shard(net, {.mesh = rank.mesh()}); }, {"head.weight", "parameter 'weight'"},
                                  "the other one is sharded already");

    auto with_buffer = seeded(3, [] { return Decoder(); });
    with_buffer->register_buffer("turned", with_buffer->embed->weight.detach().t());
    rank.check_throws<UsageError>([&] { fully_shard(with_buffer, {.mesh = rank.mesh()}); }, {"'embed.weight'", "'turned'"},
                                  "a buffer");
    // Beside each other in one matrix, not over each other.
    struct Columns : nn::Module {
      at::Tensor both = torch::arange(24.).view({4, 6});
      at::Tensor left = register_parameter("left", both.narrow(1, 0, 2)), right = register_parameter("right", both.narrow(1, 2, 4));
    } columns;
    fully_shard(columns, {.mesh = rank.mesh()});
    rank.check_identical(full_tensor(columns.right), torch::arange(24.).view({4, 6}).narrow(1, 2, 4), "no false error");
  }));
  CHECK(on_ranks(1, [&](Rank& rank) {
    auto net = tied(), plain = tied();
    fully_shard(net, {.mesh = rank.mesh()});
    for (auto* each : {&plain, &net}) {
      torch::optim::SGD optimizer((*each)->parameters(), 0.5);
      (*each)->forward(words).backward();
      optimizer.step();
    }
    rank.check_close(full_tensor(net->head->weight), plain->head->weight, "both steps are in both");
  }));
}

TEST_CASE("a tensor that shows a parameter's memory of before fully_shard cannot be read; one rank's goes on showing it",
          "[runtime][ties]") {
  for (const int world : {1, 2})
    CHECK(on_ranks(world, [&](Rank& rank) {
      auto net = seeded(3, [] { return Decoder(); });
      const auto alias = net->embed->weight.detach(), data = net->embed->weight.data();
      const auto view = net->head->weight.t();  // recorded by autograd
      const auto member = net->embed->weight, copy = net->embed->weight.detach().clone();
      auto graph = net->forward(torch::tensor({1, 2}, at::kLong));
      fully_shard(net, {.mesh = rank.mesh()});
      graph.backward();
      rank.check(net->parameters()[0].grad().defined(), "a graph from before leads to the parameters");
      net->forward(torch::tensor({1, 2}, at::kLong)).backward();
      if (world == 1) {
        torch::NoGradGuard no_grad;
        net->parameters()[0].mul_(2);
        rank.check_identical(alias, copy * 2, "one memory");
        return;
      }
      for (const auto& tensor : {alias, data})
        rank.check_throws<c10::Error>([&] { tensor.sum(); }, {"parameter 'embed.weight'", "before fully_shard", "clone"}, "an alias");
      rank.check_throws<c10::Error>([&] { view.sum(); }, {"parameter 'head.weight'", "before fully_shard"}, "a view");
      rank.check_throws<c10::Error>([&] { torch::NoGradGuard no_grad; alias.mul_(2); }, {"'embed.weight'"}, "a write");
      rank.check_identical(full_tensor(member), copy, "the member's copy is the parameter");
      rank.check_identical(copy, copy.clone(), "and a clone is a clone");
    }));
}

TEST_CASE("two parameters over one memory are refused by name where one keeps it and the other is cut, by two calls",
          "[runtime][ties]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto net = seeded(3, [] { return Decoder(); });
    net->head->weight.set_data(net->embed->weight.data());
    fully_shard(net->embed, {.mesh = rank.mesh(), .replicate_only = true});
    rank.check_throws<UsageError>([&] { fully_shard(net->head, {.mesh = rank.mesh()}); }, {"'weight'", "show the same memory"},
                                  "the first one stays where it is");
  }));
}

TEST_CASE("what shows a tied parameter's memory of before fully_shard is closed with its first write, whichever group has it by then",
          "[runtime][ties]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    TiedNet net;
    const auto view = net->input->table->weight.t();  // recorded by autograd: it is open until then
    fully_shard(net->input, {.mesh = rank.mesh()});
    fully_shard(net->output, {.mesh = rank.mesh()});
    fully_shard(net, {.mesh = rank.mesh()});
    {
      const torch::NoGradGuard no_grad;
      net->parameters()[0].mul_(2);
    }
    rank.check_throws<c10::Error>([&] { view.sum(); }, {"table.weight'", "before fully_shard"}, "a view");
  }));
}

TEST_CASE("so is what shows one that a tie moves out of the memory that one rank keeps", "[runtime][ties]") {
  const ScopedEnvironment copies(Variables{{"FSDP_COPY_ON_CPU", "1"}});
  CHECK(on_ranks(1, [](Rank& rank) {
    TiedNet net;
    const auto alias = net->input->table->weight.detach();
    fully_shard(net->input, {.mesh = rank.mesh()});
    fully_shard(net->output, {.mesh = rank.mesh()});
    fully_shard(net, {.mesh = rank.mesh(), .offload_policy = CPUOffloadPolicy{}});
    {
      const torch::NoGradGuard no_grad;
      net->parameters()[0].mul_(2);
    }
    rank.check_throws<c10::Error>([&] { alias.sum(); }, {"table.weight'", "before fully_shard"}, "an alias");
  }));
}

TEST_CASE("so is what shows a parameter that no rank cuts, where it leaves its memory", "[runtime][ties]") {
  struct Case {
    std::string name;
    int world;
    FullyShardOptions options;
  };
  for (const auto& [name, world, with] :
       {Case{"cast, on one rank", 1, {.mp_policy = {.param_dtype = at::kDouble}}},
        Case{"cast and replicated", 2, {.mp_policy = {.param_dtype = at::kDouble}, .replicate_only = true}},
        Case{"cast, flat, on one rank", 1, {.mp_policy = {.param_dtype = at::kDouble}, .layout = ParamLayout::kFlat}}})
    CHECK(on_ranks(world, [&, with = with](Rank& rank) {
      auto net = seeded(3, [] { return Decoder(); });
      const auto alias = net->embed->weight.detach(), view = net->head->weight.t();
      auto options = with;
      options.mesh = rank.mesh();
      fully_shard(net, options);
      {
        const torch::NoGradGuard no_grad;
        for (auto& parameter : net->parameters()) parameter.mul_(2);
      }
      rank.check_throws<c10::Error>([&] { alias.sum(); }, {"'embed.weight'", "before fully_shard"}, name + ": an alias");
      rank.check_throws<c10::Error>([&] { view.sum(); }, {"'head.weight'", "before fully_shard"}, name + ": a view");
    }));
}

}  // namespace
}  // namespace fsdp::test
