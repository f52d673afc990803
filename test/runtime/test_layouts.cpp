#include <catch2/catch.hpp>

#include "support/models.hpp"

// Other cuts than rows: along any dimension, and the flat layout.

namespace fsdp::test {
namespace {

namespace nn = torch::nn;
using at::Tensor;

/// Matrices, a convolution's four dimensions, a transposed weight, biases, a scalar; nothing divides evenly.
struct MixtureImpl : nn::Module {
  MixtureImpl() {
    conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(2, 5, 3).padding(1)));
    conv->weight.set_data(conv->weight.data().contiguous(at::MemoryFormat::ChannelsLast));
    up = register_module("up", nn::Linear(5, 7));
    down = register_parameter("down", (torch::randn({5, 7}) * 0.4).t());
    gain = register_parameter("gain", torch::tensor(1.5));
  }
  Tensor forward(Tensor x) {
    x = torch::tanh(conv->forward(x)).mean({2, 3});
    return torch::matmul(torch::tanh(up->forward(x)), down) * gain;
  }
  nn::Conv2d conv{nullptr};
  nn::Linear up{nullptr};
  Tensor down, gain;
};
TORCH_MODULE(Mixture);

Workload mixture() {
  Mixture net;
  return {.module = net.ptr(),
          .shard = shard_each({net->up.ptr(), net.ptr()}),
          .loss = [net](Inputs& in) mutable { return (net->forward(in.normal({3, 2, 4, 4})) * in.normal({3, 5})).mean(); }};
}

/// Cuts dimension (n + length of the name), whatever dimensions there are.
auto cut_by_name(int64_t n) {
  return [n](FullyShardOptions& options) {
    options.shard_placement_fn = [n](const std::string& name, const Tensor& parameter) -> std::optional<Shard> {
      const int64_t dims = std::max<int64_t>(parameter.dim(), 1);
      return Shard{(n + static_cast<int64_t>(name.size())) % dims - (n % 2 ? dims : 0)};
    };
  };
}

void cut_columns(FullyShardOptions& options) {
  options.shard_placement_fn = [](const std::string&, const Tensor&) { return Shard{-1}; };
}
void flat(FullyShardOptions& options) { options.layout = ParamLayout::kFlat; }

TEST_CASE("cut along any dimension, uneven ones too, a model trains like plain", "[runtime][layouts]") {
  for (int world_size : {1, 2, 3, 4, 8})
    for (int64_t n : {0, 1, 2, 3})
      trains_like_plain(mixture, {.world_size = world_size, .launches_batches = n % 2 == 1, .adjust = cut_by_name(n)});
}

TEST_CASE("cut along the last dimension with replicas, integer resharding and accumulation", "[runtime][layouts]") {
  trains_like_plain(mixture, {.world_size = 4, .replicas = 2, .adjust = cut_columns});
  trains_like_plain(mixture, {.world_size = 3, .replicate_only = true, .adjust = cut_columns});
  for (int ranks : {1, 2, 3, 6})
    trains_like_plain(mixture, {.world_size = 6, .reshard_after_forward = ranks, .adjust = cut_columns});
  trains_like_plain(mixture, {.world_size = 8, .replicas = 2, .reshard_after_forward = 2, .adjust = cut_columns});
  for (auto accumulation : {Accumulation::kReduceEach, Accumulation::kSyncAtLast, Accumulation::kLastBackward})
    trains_like_plain(mixture, {.world_size = 3, .micro_batches = 2, .accumulation = accumulation, .max_norm = 0.05,
                                .adjust = cut_columns});
  trains_like_plain(mixture, {.world_size = 4, .replicas = 2, .micro_batches = 2,
                              .accumulation = Accumulation::kAllReduceLast, .adjust = cut_columns});
}

TEST_CASE("in the flat layout a model trains like plain", "[runtime][layouts]") {
  for (int world_size : {1, 2, 3, 4, 7}) {
    trains_like_plain(mixture, {.world_size = world_size, .adjust = flat});
    trains_like_plain(mixture, {.world_size = world_size, .dtype = at::kDouble, .launches_batches = true, .adjust = flat});
  }
  trains_like_plain(mixture, {.world_size = 4, .replicas = 2, .adjust = flat});
  trains_like_plain(mixture, {.world_size = 3, .replicate_only = true, .adjust = flat});
  for (int ranks : {1, 2, 3, 6})
    trains_like_plain(mixture, {.world_size = 6, .reshard_after_forward = ranks, .adjust = flat});
  for (auto accumulation : {Accumulation::kReduceEach, Accumulation::kSyncAtLast, Accumulation::kLastBackward})
    trains_like_plain(mixture, {.world_size = 3, .micro_batches = 2, .accumulation = accumulation, .max_norm = 0.05,
                                .adjust = flat});
  trains_like_plain(mixture, {.world_size = 4, .replicas = 2, .micro_batches = 2,
                              .accumulation = Accumulation::kAllReduceLast, .adjust = flat});
}

TEST_CASE("a piece is torch's chunk of the dimension, row-major if the parameter is", "[runtime][layouts]") {
  on_ranks(3, [](Rank& rank) {
    auto linear = seeded(3, [] { return nn::Linear(7, 4); });
    const auto weight = linear->weight.detach().clone();
    auto root = fully_shard(linear, {.mesh = rank.mesh(), .shard_placement_fn = [](auto& name, auto&) {
                                       return name == "weight" ? std::optional(Shard{1}) : std::nullopt;
                                     }});
    const auto local = to_local(linear->parameters()[0]);
    rank.check_identical(local.detach(), weight.chunk(3, 1)[rank.index()], "this rank's columns");
    rank.check(local.is_contiguous(), "row-major");
    const auto tensor = dtensor_of(linear->weight);
    rank.check(tensor.placements() == std::vector<Placement>{Shard{1}}, to_string(tensor.placements()));
    rank.check_identical(tensor.full_tensor(), weight, "gathered as a DTensor");
    rank.check_identical(full_tensor(linear->weight), weight, "gathered");
    rank.check_equal(local_ranges(linear->weight).size(), size_t{4}, "one range a row");
  });
}

TEST_CASE("a transposed parameter keeps its strides, whichever dimension is cut", "[runtime][layouts]") {
  for (int64_t dim : {0, 1})
    on_ranks(2, [dim](Rank& rank) {
      auto net = seeded(3, [] { return Mixture(); });
      const auto down = net->down.detach().clone();
      const auto strides = net->down.strides().vec();
      fully_shard(net, {.mesh = rank.mesh(), .shard_placement_fn = [dim](auto&, auto& parameter) {
                          return Shard{std::min(dim, std::max<int64_t>(parameter.dim() - 1, 0))};
                        }});
      rank.check(net->down.strides() == c10::IntArrayRef(strides), "strides");
      rank.check_identical(net->down.detach().clone(), down, "values");
      rank.check_identical(full_tensor(net->down), down, "gathered");
    });
}

TEST_CASE("the flat layout holds runs: nothing is copied around an all-gather, one collective a group",
          "[runtime][layouts]") {
  on_ranks(3, [](Rank& rank) {
    auto net = seeded(3, [] { return Mixture(); });
    auto plain = seeded(3, [] { return Mixture(); });
    auto root = fully_shard(net, {.mesh = rank.mesh(), .layout = ParamLayout::kFlat});
    int64_t elements = 0;
    for (auto& [name, parameter] : unique_parameters(*net)) {
      rank.check_equal(to_local(parameter).dim(), int64_t{1}, name + ": its piece is 1-D");
      elements += to_local(parameter).numel();
      const auto whole = plain->named_parameters()[name].detach();
      rank.check_identical(parameter.detach(), local_elements(parameter, whole), name);
      rank.check_equal(parameter.sizes().vec(), whole.sizes().vec(), name + ": sizes");
      rank.check(parameter.strides() == whole.strides(), name + ": strides of the DTensor");
      rank.check_identical(full_tensor(parameter), whole, name + " gathered");
      rank.check(full_tensor(parameter).strides() == whole.strides(), name + ": strides");
      rank.check_throws<UsageError>([&] { dtensor_of(parameter); }, {name, "flat layout", "full_tensor"}, "dtensor_of");
    }
    const int64_t all = 5 * 2 * 9 + 5 + 35 + 7 + 35 + 1;
    // Each of six parameters begins at a multiple of 16 bytes, and so do the pieces.
    rank.check(elements <= (all + 6 * 3 + 3 * 4) / 3 + 3, fmt::format("{} elements on a rank", elements));
    for (int step = 0; step < 2; ++step) {
      const auto before = statistics(root);
      rank.log().clear();
      Inputs inputs(rank.index(), step);
      net->forward(inputs.normal({2, 2, 4, 4})).sum().backward();
      const auto after = statistics(root);
      rank.check_equal(rank.subjects_of("all_gather").size(), size_t(after.all_gathers - before.all_gathers), "gathers");
      rank.check_equal(rank.subjects_of("reduce_scatter").size(), size_t{1}, "one reduce-scatter");
      const int64_t gathered = after.gathered_bytes - before.gathered_bytes;
      const int64_t reduced = after.reduced_bytes - before.reduced_bytes;
      rank.check_equal(after.buffer_bytes - before.buffer_bytes, gathered + reduced + reduced / 3,
                       "one buffer a gather; packed gradients and the sum");
      net->zero_grad();
    }
  });
}

TEST_CASE("a parameter without elements goes with columns, batched launches too", "[runtime][layouts]") {
  for (const bool launches_batches : {false, true}) {
    const auto body = [](Rank& rank) {
      nn::Module module;
      const auto wide = module.register_parameter("wide", torch::ones({4, 6}));
      const auto none = module.register_parameter("none", torch::ones({0}));
      fully_shard(module, {.mesh = rank.mesh(), .shard_placement_fn = [](auto&, const Tensor& parameter) {
                             return Shard{parameter.dim() - 1};
                           }});
      (wide.sum() * (1 + rank.index()) + none.sum()).backward();
      rank.check_close(full_grad(wide), torch::full({4, 6}, 1.5), "columns");
      rank.check(sharded(none).grad().defined() && sharded(none).grad().numel() == 0, "none");
    };
    CHECK(on_ranks(2, body, {.timeout = patience(), .launches_batches = launches_batches}));
  }
}

TEST_CASE("flat: frozen parameters and other dtypes make runs of their own, and blocks stay whole",
          "[runtime][layouts]") {
  struct Many : nn::Module {
    Many() {
      a = register_parameter("a", torch::randn({6, 5}));
      frozen = register_parameter("frozen", torch::randn({11}), /*requires_grad=*/false);
      wide = register_parameter("wide", torch::randn({4, 3}, at::kDouble));
      b = register_parameter("b", torch::randn({9}));
    }
    Tensor a, frozen, wide, b;
  };
  on_ranks(4, [](Rank& rank) {
    auto net = seeded(3, [] { return std::make_shared<Many>(); });
    auto root = fully_shard(*net, {.mesh = rank.mesh(), .layout = ParamLayout::kFlat,
                                   .flat_block_numel = [](auto& name, auto&) { return name == "a" ? int64_t{5} : 1; }});
    for (const auto& range : local_ranges(net->a))
      rank.check(range.begin % 5 == 0 && (range.end % 5 == 0), fmt::format("a row is whole: [{}, {})", range.begin, range.end));
    rank.log().clear();
    const auto loss = (net->a.sum() + net->b.square().sum() + net->frozen.sum() + net->wide.sum());
    loss.backward();
    rank.check_equal(rank.subjects_of("all_gather").size(), size_t{1}, "all dtypes in one gather");
    const auto ones = torch::ones({30});
    rank.check_identical(net->parameters()[0].grad(), local_elements(net->a, ones), "a's gradient");
    rank.check(!sharded(net->frozen).grad().defined(), "the frozen one has none");
    rank.check_close(full_grad(net->wide), torch::ones({4, 3}, at::kDouble), "wide's gradient");
    rank.check_close(full_grad(net->b), 2 * full_tensor(net->b), "b's gradient");
    const auto counted = statistics(root);
    // Nothing of the frozen. Trainable floats in pieces of 20, the first that rows of 5 and 16 bytes divide;
    // doubles in pieces of 4.
    rank.check_equal(counted.reduced_bytes, int64_t{4 * (20 * 4 + 4 * 8)}, "bytes reduced");
  });
}

TEST_CASE("an unused parameter of a flat run keeps an undefined gradient", "[runtime][layouts]") {
  on_ranks(2, [](Rank& rank) {
    auto net = seeded(3, [] { return nn::Linear(4, 3); });
    fully_shard(net, {.mesh = rank.mesh(), .layout = ParamLayout::kFlat});
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      net->weight.sum().backward();
      rank.check(!sharded(net->bias).grad().defined(), "the bias");
      rank.check_close(full_grad(net->weight), torch::ones({3, 4}), "the weight");
    }
  });
}

TEST_CASE("writes through unsharded parameters reach columns and flat pieces", "[runtime][layouts]") {
  for (bool is_flat : {false, true})
    on_ranks(3, [is_flat](Rank& rank) {
      auto net = seeded(3, [] { return Mixture(); });
      FullyShardOptions options{.mesh = rank.mesh()};
      is_flat ? flat(options) : cut_columns(options);
      fully_shard(net, options);
      torch::NoGradGuard no_grad;
      for (auto& handle : {net->conv->weight, net->up->weight, net->down}) {
        const auto values = torch::arange(handle.numel(), at::kFloat).view(handle.sizes());
        Tensor(handle).copy_(values);
        rank.check_identical(to_local(sharded(handle)).reshape({-1}), local_elements(handle, values), "the piece");
        rank.check_identical(full_tensor(handle), values, "gathered");
      }
    });
}

TEST_CASE("flat: views of a parameter show its elements, and reductions are the whole's, on one rank too",
          "[runtime][layouts]") {
  for (const int world_size : {1, 2, 3})
    on_ranks(world_size, [](Rank& rank) {
      const auto make = [] { return nn::Sequential(nn::Linear(4, 3), nn::Conv1d(2, 3, 2)); };
      auto net = seeded(3, make), plain = seeded(3, make);
      fully_shard(net, {.mesh = rank.mesh(), .layout = ParamLayout::kFlat});
      at::NoGradGuard no_grad;
      const auto all = net->parameters(), wholes = plain->parameters();
      for (size_t i = 0; i < all.size(); ++i) {
        const std::vector<std::pair<const char*, std::function<Tensor(Tensor)>>> readers = {
            {"a copy", [](Tensor t) { return t.clone(); }},
            {"an element", [](Tensor t) { return t.select(0, 1); }},
            {"some rows", [](Tensor t) { return t.narrow(0, 1, 2); }},
            {"all", [](Tensor t) { return t.view_as(t); }},
            {"transposed", [](Tensor t) { return t.transpose(0, -1); }},
            {"in one dimension", [](Tensor t) { return t.view({-1}); }},
            {"the largest", [](Tensor t) { return t.max(); }},
            {"the norm", [](Tensor t) { return t.norm(1); }},
            {"sums along a dimension", [](Tensor t) { return t.sum(0); }},
        };
        for (const auto& [what, read] : readers) {
          const auto found = read(all[i]);
          rank.check_close(is_dtensor(found) ? full_tensor(found) : found, read(wholes[i]), fmt::format("{} of {}", what, i));
        }
        rank.log().clear();
        all[i].view_as(wholes[i]).copy_(2 * wholes[i]);
        rank.check_equal(rank.calls(), std::vector<std::string>{}, "what a write to a view of all communicates");
        rank.check_close(full_tensor(all[i]), 2 * wholes[i], fmt::format("after a write to a view of {}", i));
      }
    });
}

TEST_CASE("mixed precision in other layouts equals that of rows", "[runtime][layouts]") {
  for (bool is_flat : {false, true})
    on_ranks(3, [is_flat](Rank& rank) {
      auto train = [&](auto adjust) {
        auto net = seeded(3, [] { return Mixture(); });
        FullyShardOptions options{.mesh = rank.mesh(),
                                  .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}};
        adjust(options);
        fully_shard(net, options);
        std::vector<Tensor> results;
        Inputs inputs(rank.index(), 0);
        net->forward(inputs.normal({2, 2, 4, 4})).sum().backward();
        for (auto& parameter : net->parameters()) results.push_back(full_grad(parameter));
        for (auto& parameter : net->parameters()) results.push_back(full_tensor(parameter));
        return results;
      };
      const auto expected = train([](auto&) {});
      const auto found = train([&](auto& options) { is_flat ? flat(options) : cut_columns(options); });
      for (size_t i = 0; i < expected.size(); ++i) rank.check_close(found[i], expected[i], fmt::format("tensor {}", i));
    });
}

TEST_CASE("whole parameters, state dicts and clones are right in every layout and on every mesh", "[runtime][layouts]") {
  for (bool is_flat : {false, true})
    for (int64_t replicas : {0, 1, 4})
      on_ranks(4, [=](Rank& rank) {
        auto net = seeded(3, [] { return Mixture(); });
        auto plain = seeded(3, [] { return Mixture(); });
        FullyShardOptions options{.mesh = replicas > 0 ? rank.hybrid(replicas, 4 / replicas) : rank.mesh()};
        is_flat ? flat(options) : cut_columns(options);
        fully_shard(net, options);
        auto expected = plain->named_parameters();
        for (auto& entry : net->named_parameters()) {
          rank.check_identical(full_tensor(entry.value()), expected[entry.key()].detach(), entry.key() + " gathered");
        }
        {
          FullParameters scope(*net);
          for (auto& entry : net->named_parameters())
            rank.check_identical(entry.value().detach(), expected[entry.key()].detach(), entry.key() + " shown");
        }
        for (auto& entry : net->named_parameters())
          rank.check_identical(to_local(entry.value()).reshape({-1}),
                               local_elements(entry.value(), expected[entry.key()].detach()), entry.key() + " afterwards");
        const auto full = state_dict(*net, {.kind = StateDictKind::kFull});
        for (const auto& entry : full.entries)
          rank.check_identical(entry.value().value, expected[entry.key()].detach(), entry.key() + " in the full dict");
        auto sharded_dict = state_dict(*net, {.kind = StateDictKind::kSharded});
        rank.log().clear();
        load_state_dict(*net, sharded_dict);
        rank.check_equal(rank.subjects_of("all_gather").size(), size_t{0}, "no gather for its own kind");
        for (auto& entry : net->named_parameters())
          rank.check_identical(full_tensor(entry.value()), expected[entry.key()].detach(), entry.key() + " loaded");
      });
}

TEST_CASE("a clone holds what its original holds, also after parameters were frozen or converted", "[runtime][layouts]") {
  struct TwoImpl : nn::Cloneable<TwoImpl> {
    TwoImpl() { reset(); }
    void reset() override {
      a = register_parameter("a", torch::randn({4}));
      b = register_parameter("b", torch::randn({20}));
    }
    Tensor a, b;
  };
  for (bool converts : {false, true})
    on_ranks(2, [converts](Rank& rank) {
      auto net = seeded(3, [] { return std::make_shared<TwoImpl>(); });
      fully_shard(*net, {.mesh = rank.mesh(), .layout = ParamLayout::kFlat});
      if (converts)
        to(*net, at::kDouble);
      else
        net->a.set_requires_grad(false);
      auto copy = std::dynamic_pointer_cast<TwoImpl>(fsdp::clone(*net));
      rank.check(copy != nullptr, "of the same class");
      for (auto name : {"a", "b"}) {
        const auto original = net->named_parameters()[name], cloned = copy->named_parameters()[name];
        rank.check(local_ranges(original) == local_ranges(cloned), std::string(name) + ": the same elements");
        rank.check_identical(cloned.detach(), original.detach(), name);
      }
    });
}

TEST_CASE("a dimension that is not there, and options of the other layout, are refused by name",
          "[runtime][layouts]") {
  on_ranks(2, [](Rank& rank) {
    nn::Linear linear(4, 3);
    rank.check_throws<UsageError>(
        [&] { fully_shard(linear, {.mesh = rank.mesh(), .shard_placement_fn = [](auto&, auto&) { return Shard{2}; }}); },
        {"weight", "Shard(2)", "[-2, 2)"}, "dimension 2");
    rank.check_throws<UsageError>(
        [&] {
          fully_shard(linear, {.mesh = rank.mesh(), .shard_placement_fn = [](auto&, auto&) { return Shard{0}; },
                               .layout = ParamLayout::kFlat});
        },
        {"shard_placement_fn", "flat"}, "both");
    rank.check_throws<UsageError>(
        [&] { fully_shard(linear, {.mesh = rank.mesh(), .flat_block_numel = [](auto&, auto&) { return int64_t{2}; }}); },
        {"flat_block_numel", "kFlat"}, "blocks without runs");
    rank.check_throws<UsageError>(
        [&] {
          fully_shard(linear, {.mesh = rank.mesh(), .layout = ParamLayout::kFlat,
                               .flat_block_numel = [](auto&, auto&) { return int64_t{0}; }});
        },
        {"weight", "flat_block_numel", "0"}, "a block of nothing");
    rank.check(!find_fsdp_module(*linear), "nothing has changed");
  });
}

/// What a program may do with a parameter outside autograd: results, and the parameter behind each.
std::vector<std::pair<std::string, std::function<Tensor(const Tensor&)>>> uses_of_parameter() {
  return {
      {"as one dimension", [](const Tensor& p) { return p.reshape({-1}); }},
      {"the first row", [](const Tensor& p) { return p.dim() > 0 ? p[0] + 1 : p + 1; }},
      {"the last column", [](const Tensor& p) { return p.select(-1, p.size(-1) - 1).clone(); }},
      {"transposed", [](const Tensor& p) { return p.transpose(0, -1).mul(2); }},
      {"sums of rows", [](const Tensor& p) { return p.sum(-1); }},
      {"the sum", [](const Tensor& p) { return p.sum(); }},
      {"softmax", [](const Tensor& p) { return p.softmax(-1); }},
      {"beside a scalar of more bits", [](const Tensor& p) { return torch::tensor(2.0, at::kDouble) * p; }},
      {"a row-major copy", [](const Tensor& p) { return p.clone(at::MemoryFormat::Contiguous) + p; }},
      {"row-major zeros", [](const Tensor& p) { return torch::zeros_like(p, {}, at::MemoryFormat::Contiguous) + p; }},
      {"new ones", [](const Tensor& p) { return p.new_ones(p.sizes()) + p; }},
      {"a view that is written", [](const Tensor& p) { return p.transpose(0, -1).mul_(3); }},
      {"a row that is written", [](const Tensor& p) { return p.dim() > 0 ? p[0].fill_(7) : p.detach().fill_(7); }},
      {"a column that is written", [](const Tensor& p) { return p.select(-1, 0).add_(1); }},
  };
}

Tensor whole_of(const Tensor& tensor) { return is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor; }

TEST_CASE("parameters of the flat layout are the whole to operators", "[runtime][layouts]") {
  for (const int ranks : {1, 2, 3, 7})
    on_ranks(ranks, [](Rank& rank) {
      auto model = seeded(3, [] { return Mixture(); }), plain = seeded(3, [] { return Mixture(); });
      fully_shard(model, {.mesh = rank.mesh(), .layout = ParamLayout::kFlat});
      const auto expected = plain->named_parameters();
      for (const auto& item : model->named_parameters())
        for (const auto& [use, of] : uses_of_parameter()) {
          if (item.value().dim() == 0 && use.find("column") != std::string::npos) continue;
          const auto what = fmt::format("{}: {}", item.key(), use);
          const torch::NoGradGuard no_grad;
          const auto wanted = of(expected[item.key()]), found = of(item.value());
          rank.check_close(whole_of(found), wanted, what);
          rank.check_equal(std::string(found.toString()), wanted.toString(), what);
          rank.check_close(full_tensor(item.value()), expected[item.key()].detach(), what + ": the parameter behind it");
        }
    });
}

TEST_CASE("a copy of a parameter of the flat layout has gradients as any leaf", "[runtime][layouts]") {
  for (const int ranks : {1, 2, 3})
    on_ranks(ranks, [](Rank& rank) {
      auto model = seeded(3, [] { return Mixture(); }), plain = seeded(3, [] { return Mixture(); });
      fully_shard(model, {.mesh = rank.mesh(), .layout = ParamLayout::kFlat});
      const auto expected = plain->named_parameters();
      for (const auto& item : model->named_parameters()) {
        const auto copy = item.value().detach().clone().set_requires_grad(true);
        const auto whole = expected[item.key()].detach().clone().set_requires_grad(true);
        for (const auto& leaf : {copy, whole}) (leaf * leaf).sum().backward();
        rank.check(is_dtensor(copy.grad()), item.key() + ": the gradient is sharded");
        rank.check_close(whole_of(copy.grad()), whole.grad(), item.key() + ": gradient");
        DTensor(copy).full_tensor().sin().sum().backward();
        whole.sin().sum().backward();
        rank.check_close(whole_of(copy.grad()), whole.grad(), item.key() + ": gradient of the whole");
        const torch::NoGradGuard no_grad;
        copy.add_(copy.grad(), -0.1);
        rank.check_close(whole_of(copy), whole - 0.1 * whole.grad(), item.key() + ": a step");
        const auto redistribute = [&] { DTensor(copy).redistribute(std::vector<Placement>{Shard{0}}); };
        rank.check_throws<UsageError>(redistribute, {"flat"}, "placements");
      }
    });
}

}  // namespace
}  // namespace fsdp::test
