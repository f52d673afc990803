#include <catch2/catch.hpp>

#include <cstdlib>
#include <random>

#include "saved_parts.hpp"
#include "support/drawn_module.hpp"
#include "support/sample.hpp"
#include "support/tensor_parallel_model.hpp"
#include "temporary_folder.hpp"

// Modules drawn at random, saved by one world and loaded by another, cut otherwise: always the plain module's bits.
// FSDP_CHECKPOINT_DRAWS says how many.

namespace fsdp::test {
namespace {

namespace nn = torch::nn;
using at::Tensor;

uint64_t draws() {
  const char* count = std::getenv("FSDP_CHECKPOINT_DRAWS");
  return count == nullptr ? 40 : static_cast<uint64_t>(std::atoi(count));
}

std::shared_ptr<DrawnImpl> drawn_module(uint64_t seed) {
  static const DrawnParts parts{
      .dtypes = {at::kFloat, at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong, at::kByte},
      .dims = 3, .sizes = {0, 1, 2, 5, 40, 700}, .third_size = 5};
  return drawn_module(seed, seed, parts);
}

/// A world, and how it cuts.
struct Cut {
  explicit Cut(std::mt19937_64& draw) : ranks(1 + pick(draw, 6)), dim(pick(draw, 4)), is_flat(pick(draw, 3) == 0), is_plain(pick(draw, 8) == 0) {
    if (ranks % 2 == 0) replicas = pick(draw, 3);
    if (replicas == 0) replicate_only = pick(draw, 6) == 0;
  }
  void shard(DrawnImpl& module, const Rank& rank) const {
    if (is_plain) return;
    FullyShardOptions options{.mesh = replicas > 0 ? rank.hybrid(replicas, ranks / replicas) : rank.mesh(), .replicate_only = replicate_only};
    if (is_flat && !replicate_only) options.layout = ParamLayout::kFlat;
    else if (!replicate_only)
      options.shard_placement_fn = [d = dim](const std::string&, const Tensor& parameter) {
        return Shard{parameter.dim() > 0 ? d % parameter.dim() : 0};
      };
    module.shard(options);
  }
  std::string name() const {
    return fmt::format("{} ranks, {} replicas, dim {}, flat {}, plain {}, replicated {}", ranks, replicas, dim, is_flat, is_plain, replicate_only);
  }
  int ranks, replicas = 0, dim;
  bool is_flat, is_plain, replicate_only = false;
};

/// Bits, so that NaNs and negative zeros count too.
Tensor bits(const Tensor& tensor) { return tensor.detach().clone(at::MemoryFormat::Contiguous).view({-1}).view(at::kByte); }

Tensor whole_of(const Tensor& parameter) { return is_fsdp_parameter(parameter) ? full_tensor(parameter) : parameter; }

NamedTensors all_of(const nn::Module& module) {
  NamedTensors all;
  for (const auto& item : module.named_parameters()) all.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers()) all.emplace_back(item.key(), item.value());
  return all;
}

void check_bits(const Rank& rank, const nn::Module& module, const nn::Module& plain, const std::string& what) {
  const auto found = all_of(module), expected = all_of(plain);
  rank.check_equal(found.size(), expected.size(), what);
  for (size_t i = 0; i < found.size(); ++i)
    rank.check_identical(bits(whole_of(found[i].second)), bits(expected[i].second), what + ": " + found[i].first);
}

void clear(nn::Module& module) {
  at::NoGradGuard no_grad;
  for (auto& item : all_of(module)) item.second.zero_();
}

TEST_CASE("what any world saves, however it is cut, any other loads to the bit", "[checkpoint][properties]") {
  TemporaryFolder folder;
  Sample sample(1);
  for (uint64_t seed = 0; seed < draws(); ++seed) {
    if (!sample.takes_next()) continue;
    std::mt19937_64 draw(seed + 500);
    const Cut from(draw), to(draw);
    SaveCheckpointOptions saving{.max_file_bytes = pick(draw, 2) ? 3000 : int64_t{1} << 30};
    LoadCheckpointOptions loading{.max_extra_bytes = int64_t{4} << 20};
    loading.readers = pick(draw, 4) == 0 ? CheckpointReaders::kFirstRank : CheckpointReaders::kAllRanks;
    loading.verify = std::vector{VerifyChecksums::kWhileLoading, VerifyChecksums::kBeforeLoading, VerifyChecksums::kNever}[pick(draw, 3)];
    const auto what = fmt::format("seed {}: {} -> {}", seed, from.name(), to.name());
    INFO(what);
    CHECK(on_ranks(from.ranks, [&](Rank& rank) {
      auto module = drawn_module(seed);
      from.shard(*module, rank);
      auto options = saving;
      options.world = rank.world();
      save_checkpoint(folder / "c", {module}, options);
      rank.check(true, what);
    }));
    const auto load = [&](const Cut& cut, const std::string& name) {
      CHECK(on_ranks(cut.ranks, [&](Rank& rank) {
        auto module = drawn_module(seed), plain = drawn_module(seed);
        cut.shard(*module, rank);
        clear(*module);
        auto options = loading;
        options.world = rank.world();
        load_checkpoint(folder / "c", {module}, options);
        check_bits(rank, *module, *plain, name);
      }));
    };
    load(to, what);
    load(Cut(draw), what + ", and once more");
  }
}

TEST_CASE("tensor-parallel parameters are saved as wholes and loaded as other parts", "[checkpoint][properties]") {
  TemporaryFolder folder;
  const std::vector<TpCase> cases{{.shape = {2, 2}, .hidden = 7}, {.shape = {1, 3}, .hidden = 7}, {.shape = {4, 1}, .hidden = 7},
                                  {.shape = {2, 2}, .hidden = 7, .says = Says::kMesh, .dim = 1},
                                  {.shape = {2, 2}, .hidden = 7, .layout = ParamLayout::kFlat},
                                  {.shape = {2, 1, 2}, .hidden = 7, .is_merged = true}};
  for (const auto& from : cases) {
    CHECK(on_ranks(from.ranks(), [&](Rank& rank) {
      TpModel tp(rank, from);
      tp.shard(from);
      save_checkpoint(folder / "c", {tp.model}, {.world = rank.world()});
      rank.check(true, from.text());
    }));
    for (const auto& to : cases)
      CHECK(on_ranks(to.ranks(), [&](Rank& rank) {
        TpModel tp(rank, to, 5), expected(rank, to);
        tp.shard(to);
        load_checkpoint(folder / "c", {tp.model}, {.world = rank.world()});
        const auto plain = expected.plain->named_parameters();
        for (const auto& item : tp.model->named_parameters())
          rank.check_identical(full_tensor(item.value()), plain[item.key()].detach(), from.text() + " -> " + to.text() + ": " + item.key());
      }));
  }
}

}  // namespace
}  // namespace fsdp::test
