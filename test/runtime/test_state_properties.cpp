#include <catch2/catch.hpp>

#include <random>

#include "support/drawn_module.hpp"

// Materialising, sending from the first rank and converting, for modules drawn at random: any number of
// dimensions, empty ones, strides, dtypes, groups, ranks and meshes.

namespace fsdp::test {
namespace {

namespace nn = torch::nn;
using at::Tensor;

/// The same structure for the same seed; other values on other ranks.
std::shared_ptr<DrawnImpl> drawn_module(uint64_t seed, int rank = 0) {
  static const DrawnParts parts{.dtypes = {at::kFloat, at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong},
                                .sizes = {0, 1, 2, 3, 5, 9}};
  return drawn_module(seed, seed * 16 + static_cast<uint64_t>(rank), parts);
}

struct DrawnState {
  explicit DrawnState(uint64_t seed) : seed(seed) {
    std::mt19937_64 draw(seed + 1000);
    ranks = 1 + pick(draw, 8);
    if (ranks % 2 == 0) replicas = pick(draw, 3);
    if (replicas == 0) replicate_only = pick(draw, 6) == 0;
  }
  FullyShardOptions options(const Rank& rank) const {
    return {.mesh = replicas > 0 ? rank.hybrid(replicas, ranks / replicas) : rank.mesh(), .replicate_only = replicate_only};
  }
  std::string name() const { return fmt::format("seed {}, {} ranks, {} replicas{}", seed, ranks, replicas, replicate_only ? ", replicated" : ""); }

  uint64_t seed;
  int ranks = 1, replicas = 0;
  bool replicate_only = false;
};

void check_same(const Rank& rank, const nn::Module& module, const nn::Module& plain, const std::string& what) {
  const auto found = unique_parameters(module), expected = unique_parameters(plain);
  rank.check_equal(found.size(), expected.size(), what);
  for (size_t i = 0; i < found.size(); ++i) {
    const auto& [name, parameter] = found[i];
    rank.check_identical(dtensor_of(parameter).full_tensor().detach(), expected[i].second.detach(), what + ": " + name);
    rank.check_equal(parameter.requires_grad(), expected[i].second.requires_grad(), what + ": requires_grad of " + name);
    rank.check_identical(fsdp::unsharded(parameter).detach().clone(), expected[i].second.detach(), what + ": the member of " + name);
  }
  for (const auto& buffer : plain.named_buffers())
    rank.check_identical(module.named_buffers()[buffer.key()], buffer.value(), what + ": buffer " + buffer.key());
}

InitOptions catch_all() {
  auto fill = [](nn::Module& module, Initializer& init) {
    for (const auto& item : module.named_parameters(false)) switch (item.key().back() % 4) {
        case 0: init.normal_(item.value(), 0, 9); break;
        case 1: init.uniform_(item.value(), -9, 9); break;
        case 2: init.whole_(item.value(), [](Tensor& whole, at::Generator generator) { whole.random_(-9, 9, generator); }); break;
        default: init.constant_(item.value(), 3);
      }
    for (const auto& item : module.named_buffers(false)) init.normal_(item.value());
  };
  return {.seed = 3, .initializers = {initializer<nn::Module>(fill)}};
}

constexpr uint64_t kDraws = 40;

TEST_CASE("any module on meta gets the plain one's first values", "[runtime][state_properties]") {
  for (uint64_t seed = 0; seed < kDraws; ++seed) {
    const DrawnState drawn(seed);
    on_ranks(drawn.ranks, [&](Rank& rank) {
      auto plain = drawn_module(seed), module = drawn_module(seed);
      init_parameters(*plain, catch_all());
      to(*module, at::kMeta);
      module->shard(drawn.options(rank));
      materialize(*module, catch_all());
      check_same(rank, *module, *plain, drawn.name());
    });
  }
}

TEST_CASE("any module gets the first rank's values, whichever parts the others have on meta", "[runtime][state_properties]") {
  for (uint64_t seed = 0; seed < kDraws; ++seed) {
    const DrawnState drawn(seed);
    on_ranks(drawn.ranks, [&](Rank& rank) {
      auto first = drawn_module(seed), module = drawn_module(seed, rank.index());
      std::mt19937_64 draw(seed * 8 + rank.index());
      if (rank.index() > 0 && pick(draw, 3) == 0) to(*module, at::kMeta);
      for (auto& child : module->blocks)
        if (rank.index() > 0 && pick(draw, 2)) to(*child, at::kMeta);
      auto options = drawn.options(rank);
      options.sync_from_rank0 = true;
      module->shard(options);
      check_same(rank, *module, *first, drawn.name());
    });
  }
}

TEST_CASE("any module is converted like the plain one", "[runtime][state_properties]") {
  for (uint64_t seed = 0; seed < kDraws; ++seed) {
    const DrawnState drawn(seed);
    on_ranks(drawn.ranks, [&](Rank& rank) {
      auto plain = drawn_module(seed), module = drawn_module(seed);
      module->shard(drawn.options(rank));
      for (auto dtype : {at::kBFloat16, at::kDouble, at::kFloat}) {
        to(*plain, dtype);
        to(*module, dtype);
        check_same(rank, *module, *plain, drawn.name());
        // Reading has gathered the groups; the next conversion finds them so.
      }
    });
  }
}

}  // namespace
}  // namespace fsdp::test
