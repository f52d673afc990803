#include <catch2/catch.hpp>

#include <filesystem>
#include <random>

#include "checkpoint/temporary_folder.hpp"
#include "support/counting_allocator.hpp"
#include "support/models.hpp"
#include "support/odd_model.hpp"

// State dicts of modules: full, sharded, local; saved and loaded.

namespace fsdp::test {
namespace {

using at::Tensor;

/// `plain`'s parameters and buffers are those of a full dict, under every one of its names.
void check_full(const Rank& rank, const StateDict& dict, const torch::nn::Module& plain, const std::string& what) {
  auto check = [&](const std::string& name, const Tensor& expected) {
    const auto* entry = dict.find(name);
    rank.check(entry != nullptr, what + ": has " + name);
    if (entry == nullptr) return;
    rank.check(entry->value.scalar_type() == expected.scalar_type(), what + ": dtype of " + name);
    rank.check(entry->value.strides() == expected.strides(), what + ": strides of " + name);
    rank.check_identical(entry->value, expected.detach(), what + ": " + name);
    rank.check(!entry->value.requires_grad(), what + ": no autograd");
  };
  for (auto& item : plain.named_parameters()) check(item.key(), item.value());
  for (auto& item : plain.named_buffers()) check(item.key(), item.value());
  rank.check_equal(dict.entries.size() + dict.other_names.size(),
                   plain.named_parameters().size() + plain.named_buffers().size(), what + ": nothing else");
}

/// The model's full values are `plain`'s.
void check_loaded(const Rank& rank, Odd& model, const Odd& plain, const std::string& what) {
  check_full(rank, state_dict(model), *plain, what);
}

TEST_CASE("a full dict is the plain module's state", "[runtime][state_dict]") {
  on_odd_cases([](Rank& rank, const OddCase& odd) {
    auto plain = plain_odd(), model = plain_odd();
    shard_odd(model, rank, odd);
    auto dict = state_dict(model);
    check_full(rank, dict, *plain, odd.name);
    rank.check_equal(dict.other_names.at("head.weight"), std::string("embed.weight"), "the tied name");
    // Independent of the model.
    {
      at::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) parameter.zero_();
      model->counts.zero_();
    }
    check_full(rank, dict, *plain, odd.name + ", after writes");
  });
}

TEST_CASE("the order of modules and parts of the tree keep their names", "[runtime][state_dict]") {
  on_ranks(3, [](Rank& rank) {
    auto plain = plain_odd(), model = plain_odd();
    shard_odd(model, rank, {});
    check_full(rank, state_dict(model->lin), *plain->lin, "a unit");
    check_full(rank, state_dict(model->norm), *plain->norm, "a module in the root's group");
    check_full(rank, state_dict(model->head), *plain->head, "a module whose weight is tied");
    auto chain = plain_chain();
    check_full(rank, state_dict(chain), *chain, "a plain module");
  });
}

TEST_CASE("mixed precision saves the original dtypes, cast buffers included", "[runtime][state_dict]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_odd(), model = plain_odd();
    shard_odd(model, rank, {}, {.param_dtype = at::kBFloat16, .buffer_dtype = at::kDouble, .is_exempt = {}});
    rank.check(model->norm->running_mean.scalar_type() == at::kDouble, "a cast buffer");
    check_full(rank, state_dict(model), *plain, "full");
    rank.check(state_dict(model, {.kind = StateDictKind::kLocal}).find("norm.running_var")->value.scalar_type() == at::kFloat, "local");
  });
}

TEST_CASE("rank0_only keeps the dict on the first rank, cpu_offload copies", "[runtime][state_dict]") {
  on_odd_cases([](Rank& rank, const OddCase& odd) {
    auto plain = plain_odd(), model = plain_odd();
    shard_odd(model, rank, odd);
    auto dict = state_dict(model, {.rank0_only = true, .cpu_offload = true});
    if (rank.index() == 0)
      check_full(rank, dict, *plain, odd.name);
    else
      rank.check_equal(dict.entries.size() + dict.other_names.size(), size_t{0}, odd.name + ": empty elsewhere");
    for (auto kind : {StateDictKind::kSharded, StateDictKind::kLocal})
      rank.check_throws<UsageError>([&] { state_dict(model, {.kind = kind, .rank0_only = true}); }, {"rank0_only", "kFull"}, "kinds");
  });
}

TEST_CASE("a sharded dict holds DTensors of this rank's memory", "[runtime][state_dict]") {
  on_odd_cases([](Rank& rank, const OddCase& odd) {
    auto plain = plain_odd(), model = plain_odd();
    shard_odd(model, rank, odd);
    rank.log().clear();
    auto dict = state_dict(model, {.kind = StateDictKind::kSharded});
    rank.check_equal(rank.log().calls.size(), size_t{0}, "nothing is communicated");
    for (auto& [name, parameter] : unique_parameters(*plain)) {
      const auto& entry = *dict.find(name);
      rank.check_equal(entry.is_sharded, name != "plain", name + " is sharded");
      rank.check_equal(entry.sizes, parameter.sizes().vec(), name + ": sizes of the whole");
      if (!entry.is_sharded) continue;
      rank.check_identical(entry.dtensor.full_tensor(), parameter.detach(), odd.name + ": " + name);
      auto registered = sharded(model->named_parameters()[name]);
      rank.check(entry.ranges == local_ranges(registered), name + ": ranges");
      rank.check(entry.value.is_alias_of(to_local(registered)) || entry.value.numel() == 0, name + ": shares memory");
    }
    auto copy = state_dict(model, {.kind = StateDictKind::kSharded, .cpu_offload = true});
    rank.check(!copy.find("lin.weight")->value.is_alias_of(to_local(model->lin->parameters()[0])), "offloaded: a copy");
  });
}

TEST_CASE("every kind loads back what it saved", "[runtime][state_dict]") {
  on_odd_cases([](Rank& rank, const OddCase& odd) {
    for (auto kind : {StateDictKind::kFull, StateDictKind::kSharded, StateDictKind::kLocal}) {
      auto plain = plain_odd(), model = plain_odd(), other = plain_odd(8);
      shard_odd(model, rank, odd);
      shard_odd(other, rank, odd, {.param_dtype = at::kBFloat16});
      rank.log().clear();
      auto dict = state_dict(model, {.kind = kind, .cpu_offload = true});
      rank.log().clear();
      rank.check(load_state_dict(other, dict).empty(), "fits");
      rank.check_equal(rank.log().calls.size(), size_t{0}, "loading its own kind communicates nothing");
      check_loaded(rank, other, plain, odd.name);
      other->eval();
      plain->eval();
      at::NoGradGuard no_grad;
      Inputs in(0, 0), again(0, 0);
      shard_odd(model = plain_odd(9), rank, odd);
      load_state_dict(model, dict);
      model->eval();
      rank.check_close(model->loss(in), plain->loss(again), odd.name + ": and runs like it");
    }
  });
}

TEST_CASE("loaded values are seen by a forward that had gathered others", "[runtime][state_dict]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    auto other = seeded(6, [] { return Chain(3, 6); });
    auto x = torch::ones({1, 6});
    at::NoGradGuard no_grad;
    chain.model->forward(x);
    chain.layers[0].unshard();
    load_state_dict(chain.model, state_dict(other));
    rank.check_close(chain.model->forward(x), other->forward(x), "the next forward");
  });
}

TEST_CASE("only rank 0 has the values: they are broadcast one tensor at a time", "[runtime][state_dict]") {
  on_odd_cases([](Rank& rank, const OddCase& odd) {
    auto plain = plain_odd(), model = plain_odd(8);
    shard_odd(model, rank, odd);
    auto dict = rank.index() == 0 ? state_dict(plain) : StateDict{};
    rank.log().clear();
    rank.check(load_state_dict(model, dict, {.broadcast_from_rank0 = true}).empty(), "fits");
    check_loaded(rank, model, plain, odd.name);
    for (auto& call : rank.log().calls)
      if (call.operation == "broadcast") rank.check(call.bytes < 2000, "small pieces: " + call.subject);
  });
}

TEST_CASE("full and sharded dicts load on another mesh", "[runtime][state_dict]") {
  on_ranks(4, [](Rank& rank) {
    auto plain = plain_odd();
    std::vector<OddCase> cases{{"1-D", 4}, {"2 x 2", 4, 2}, {"replicas", 4, 0, true}};
    for (auto& from : cases)
      for (auto& to : cases) {
        auto source = plain_odd();
        shard_odd(source, rank, from);
        for (auto kind : {StateDictKind::kFull, StateDictKind::kSharded}) {
          auto model = plain_odd(8);
          shard_odd(model, rank, to);
          load_state_dict(model, state_dict(source, {.kind = kind}));
          check_loaded(rank, model, plain, from.name + " to " + to.name);
        }
        auto model = plain_odd(8);
        load_state_dict(model, state_dict(source, {.kind = StateDictKind::kSharded}));
        check_loaded(rank, model, plain, from.name + " to a plain module");
      }
    auto source = plain_odd(), model = plain_odd(8);
    shard_odd(source, rank, cases[0]);
    shard_odd(model, rank, cases[2]);
    auto local = state_dict(source, {.kind = StateDictKind::kLocal});
    rank.check_throws<UsageError>([&] { load_state_dict(model, local); }, {"'lin.weight'", "another rank's part"}, "local");
    check_loaded(rank, model, plain_odd(8), "nothing was changed");
  });
}

/// Every way to lay a model out on four ranks, parameters with fewer rows than ranks among them.
std::vector<std::pair<std::string, FullyShardOptions>> layouts_on(const Rank& rank) {
  const auto crossed = init_device_mesh(rank.world(), {2, 2}, {"replicate", "shard"}, {.ranks = {0, 2, 1, 3}});
  const auto last = [](const std::string&, const Tensor&) { return Shard{-1}; };
  return {{"1-D", {.mesh = rank.mesh()}},
          {"2 x 2", {.mesh = rank.hybrid(2, 2)}},
          {"2 x 2, crossed", {.mesh = crossed}},
          {"replicas", {.mesh = rank.mesh(), .replicate_only = true}},
          {"along the last dimension", {.mesh = rank.mesh(), .shard_placement_fn = last}},
          {"flat", {.mesh = rank.mesh(), .layout = ParamLayout::kFlat}},
          {"flat, 2 x 2", {.mesh = rank.hybrid(2, 2), .layout = ParamLayout::kFlat}}};
}

struct SmallImpl : torch::nn::Module {
  torch::nn::Linear pair = register_module("pair", torch::nn::Linear(3, 2));
  torch::nn::Linear one = register_module("one", torch::nn::Linear(2, 1));
  Tensor scale = register_parameter("scale", torch::rand({}));
};
TORCH_MODULE(Small);

TEST_CASE("a dict of another layout is loaded on all ranks or refused on all, with nothing changed",
          "[runtime][state_dict]") {
  on_ranks(4, [](Rank& rank) {
    const auto layouts = layouts_on(rank);
    const auto small = [](uint64_t seed) { return seeded(seed, [] { return Small(); }); };
    for (const auto& [from_name, from] : layouts)
      for (const auto& [to_name, to] : layouts)
        for (auto kind : {StateDictKind::kSharded, StateDictKind::kLocal}) {
          auto source = small(1), model = small(2);
          fully_shard(source, from);
          fully_shard(model, to);
          const auto dict = state_dict(source, {.kind = kind, .cpu_offload = true});
          bool is_loaded = true;
          try {
            load_state_dict(model, dict);
          } catch (const UsageError&) {
            is_loaded = false;
          }
          const auto what = fmt::format("{} to {}, {}", from_name, to_name, kind == StateDictKind::kLocal ? "local" : "sharded");
          const auto all = torch::empty({4}, at::kInt);
          rank.world()->start_all_gather(all, torch::full({1}, static_cast<int>(is_loaded), at::kInt), "test")->wait();
          rank.check(all.eq(static_cast<int>(is_loaded)).all().item<bool>(), what + ": the same on all ranks");
          if (from_name == to_name) rank.check(is_loaded, what + ": its own layout");
          check_full(rank, state_dict(model), *small(is_loaded ? 1 : 2), what);
        }
  });
}

TEST_CASE("a full dict goes into a plain module, and a plain one's into a sharded", "[runtime][state_dict]") {
  on_ranks(3, [](Rank& rank) {
    auto plain = plain_odd(), model = plain_odd();
    shard_odd(model, rank, {});
    auto copy = plain_odd(8);
    load_state_dict(copy, state_dict(model));
    check_full(rank, state_dict(copy), *plain, "into a plain module");
    rank.check(copy->embed->weight.is_same(copy->head->weight), "its ties stay");
    auto back = plain_odd(9);
    shard_odd(back, rank, {});
    load_state_dict(back, state_dict(copy));
    check_loaded(rank, back, plain, "and back");
  });
}

TEST_CASE("strict loading names everything that does not fit and changes nothing", "[runtime][state_dict]") {
  for (bool broadcast : {false, true})
    on_odd_cases([&](Rank& rank, const OddCase& odd) {
      auto plain = plain_odd(), model = plain_odd();
      shard_odd(model, rank, odd);
      auto dict = state_dict(plain_odd(8));
      dict.entries.erase("lin.bias");
      dict.insert("lin.weight", torch::ones({5, 4}));
      dict.insert("scale", torch::full({}, c10::complex<float>(1, 1)));
      dict.insert("counts", torch::ones({4}));
      dict.insert("extra", torch::ones({1}));
      if (broadcast && rank.index() != 0) dict = {};
      const LoadOptions options{.broadcast_from_rank0 = broadcast};
      rank.check_throws<UsageError>([&] { load_state_dict(model, dict, options); },
                                    {"Missing: 'lin.bias'", "Unexpected: 'extra'", "'lin.weight' has sizes (5, 4), expected (5, 5)",
                                     "'scale' is ComplexFloat, which cannot be converted to Float", "'counts' is Float, which cannot be converted to Long"},
                                    odd.name);
      check_loaded(rank, model, plain, odd.name + ": nothing changed");
      auto result = load_state_dict(model, dict, {.strict = false, .broadcast_from_rank0 = broadcast});
      rank.check_equal(result.missing, std::vector<std::string>{"'lin.bias'"}, "missing");
      rank.check_equal(result.unexpected, std::vector<std::string>{"'extra'"}, "unexpected");
      rank.check_equal(result.wrong.size(), size_t{3}, "wrong");
      auto now = state_dict(model);
      auto other = plain_odd(8);
      rank.check_identical(now.find("embed.weight")->value, other->embed->weight.detach(), "what fits is loaded");
      rank.check_identical(now.find("lin.weight")->value, plain->lin->weight.detach(), "what does not is left");
    });
}

TEST_CASE("dtypes are converted, and a tensor is found under any of its names", "[runtime][state_dict]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_odd(8), model = plain_odd();
    shard_odd(model, rank, {});
    StateDict dict;
    for (auto& item : plain->named_parameters())
      if (item.key() != "embed.weight") dict.insert(item.key(), item.value().is_floating_point() ? item.value().detach().to(at::kDouble) : item.value());
    for (auto& item : plain->named_buffers()) dict.insert(item.key(), item.value());
    load_state_dict(model, dict);
    check_loaded(rank, model, plain, "by the second name, in double");
    dict.insert("embed.weight", plain->embed->weight.detach());
    rank.check(load_state_dict(model, dict).empty(), "both names are no surprise");
  });
}

/// Parameters of any shape, dtype and memory order.
struct ShapesImpl : torch::nn::Module {
  explicit ShapesImpl(unsigned seed) {
    std::mt19937 draw(seed);
    for (int i = 0; i < 6; ++i) {
      std::vector<int64_t> sizes;
      for (unsigned dim = 0, dims = draw() % 5; dim < dims; ++dim) sizes.push_back(draw() % 8);
      const at::ScalarType dtypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kLong, at::kBool};
      auto values = (torch::rand(sizes) * 100).to(dtypes[draw() % 5]);
      if (values.dim() == 4 && draw() % 2) values = values.contiguous(at::MemoryFormat::ChannelsLast);
      if (values.dim() == 2 && draw() % 2) values = values.t();
      register_parameter(fmt::format("p{}", i), values, /*requires_grad=*/false);
    }
  }
};
TORCH_MODULE(Shapes);

TEST_CASE("any shapes and dtypes survive every kind of dict, and a scope", "[runtime][state_dict]") {
  for (unsigned seed = 0; seed < 24; ++seed)
    on_ranks(1 + static_cast<int>(seed % 8), [&](Rank& rank) {
      auto make = [&] { return seeded(seed, [&] { return Shapes(seed); }); };
      auto plain = make(), model = make(), other = make();
      for (auto* net : {&model, &other}) fully_shard(*net, {.mesh = rank.mesh()});
      for (auto kind : {StateDictKind::kFull, StateDictKind::kSharded, StateDictKind::kLocal}) {
        for (auto& parameter : other->parameters()) parameter.zero_();
        load_state_dict(other, state_dict(model, {.kind = kind}));
        auto dict = state_dict(other);
        for (auto& item : plain->named_parameters())
          rank.check_identical(dict.find(item.key())->value, item.value(), fmt::format("seed {}: {}", seed, item.key()));
      }
      for (auto& parameter : other->parameters()) parameter.zero_();
      {
        FullParameters scope(other);
        for (auto& item : plain->named_parameters()) other->named_parameters()[item.key()].copy_(item.value());
      }
      FullParameters scope(other, {.writeback = false});
      for (auto& item : plain->named_parameters())
        rank.check_identical(other->named_parameters()[item.key()], item.value(), fmt::format("seed {}, scope: {}", seed, item.key()));
    });
}

TEST_CASE("a full dict needs one parameter's memory beside what is kept", "[runtime][state_dict][memory]") {
  install_counting_allocator();
  for (int rank : {0, 5}) {
    const auto world = simulated_network({.world_size = 8, .rank = rank});
    ShardedChain chain(init_device_mesh(world, {8}, {"shard"}), 6, 64);
    const int64_t largest = 64 * 64 * 4, total = 6 * (64 * 64 + 64) * 4 + (64 * 2 + 2) * 4;
    const auto before = live_bytes();
    start_recording();
    const auto dict = state_dict(chain.model, {.rank0_only = true, .cpu_offload = true});
    const auto kept = live_bytes() - before;
    CHECK(kept == (rank == 0 ? total : 0));
    CHECK(peak_bytes() - before <= kept + 2 * largest);
  }
}

TEST_CASE("a broadcast needs a full dict on the first rank, and says so on all", "[runtime][state_dict]") {
  on_ranks(2, [](Rank& rank) {
    auto model = plain_odd();
    shard_odd(model, rank, {});
    auto dict = state_dict(model, {.kind = StateDictKind::kSharded});
    rank.check_throws<UsageError>([&] { load_state_dict(model, dict, {.broadcast_from_rank0 = true}); }, {"full dict"}, "kind");
    auto plain = plain_odd();
    rank.check_throws<UsageError>([&] { load_state_dict(plain, {}, {.broadcast_from_rank0 = true}); }, {"sharded parameters"}, "plain");
    FullParameters scope(model);
    rank.check_throws<StateError>([&] { state_dict(model); }, {"full parameters"}, "while shown");
  });
}

TEST_CASE("ranks that torch::save to one path leave a whole file there", "[runtime][state_dict]") {
  namespace fs = std::filesystem;
  const TemporaryFolder folder;
  const auto path = [&](const std::string& name) { return (fs::path(folder.path()) / name).string(); };
  on_ranks(3, [&](Rank& rank) {
    auto chain = plain_chain();
    fully_shard(chain, {.mesh = rank.mesh()});
    torch::optim::Adam optimizer(chain->parameters(), 0.01);
    const std::string model_path = path("model.pt"), optimizer_path = path("optimizer.pt");
    for (int step = 0; step < 5; ++step) {
      chain->forward(torch::ones({1, chain->parameters()[0].size(1)})).sum().backward();
      optimizer.step();
      torch::save(chain, model_path);
      torch::save(optimizer, optimizer_path.c_str());
      torch::load(chain, model_path);
      torch::load(optimizer, optimizer_path);
    }
    rank.check(optimizer.state().size() == chain->parameters().size(), "loaded");
  });
  torch::save(torch::ones({2}), path("tensor.pt"));
  torch::save(std::vector<at::Tensor>{torch::ones({2})}, path("tensors.pt"));
  {
    SavedFile given_up(path("tensor.pt"));
    given_up.stream() << "half of";
  }
  at::Tensor tensor;
  torch::load(tensor, path("tensor.pt"));
  CHECK(tensor.equal(torch::ones({2})));
  CHECK(std::distance(fs::directory_iterator(folder.path()), {}) == 4);
  CHECK_THROWS_AS(torch::save(tensor, path("no/folder")), StateError);
}

}  // namespace
}  // namespace fsdp::test
