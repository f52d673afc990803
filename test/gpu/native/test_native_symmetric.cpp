// NCCL's symmetric memory: the same gradients in it as without, and after what goes wrong.
#include <fmt/format.h>

#include "native_device.hpp"
#include "native_world.hpp"
#include "support/models.hpp"

namespace fsdp::test {
namespace {

constexpr int64_t kWide = 256;

int all_ranks() { return rank_processes().value_or(1); }

void use_symmetric_memory(ShardedChain& chain) {
  for (auto& layer : chain.layers) layer.set_symm_mem_for_comm();
  chain.root[0].set_symm_mem_for_comm();
}

void train_one_step(const Rank& rank, ShardedChain& chain, int step) {
  auto plain = plain_chain(static_cast<int>(chain.layers.size()), kWide);
  const auto expected = averaged_gradients(plain, rank.size(), step);
  chain.loss(rank.index(), step).backward();
  check_gradients(rank, *chain.model, expected, fmt::format("step {}", step));
  chain.model->zero_grad();
}

/// Where NCCL makes no windows here, the figures are those of LibTorch's memory.
void tell_bytes(const Rank& rank, const ShardedChain& chain, const std::string& what) {
  if (rank.index() == 0)
    tell_figure(what, fmt::format("\"symmetric_bytes\": {}", parameter_bytes(chain.root[0]).symmetric));
}

bool is_refused() {
  if (is_on_gpu()) return false;
  CHECK(on_ranks(all_ranks(), [](Rank& rank) {
    ShardedChain chain(rank.mesh(), 2, kWide);
    rank.check_throws<StateError>([&] { use_symmetric_memory(chain); }, {"gloo", "no symmetric memory"}, "over gloo");
  }));
  return true;
}

double step_ms(const Rank& rank, ShardedChain& chain) {
  constexpr int kSteps = 10;
  for (int step = 0; step < 3; ++step) chain.step(rank.index());
  synchronize_device();
  const auto begin = std::chrono::steady_clock::now();
  for (int step = 0; step < kSteps; ++step) chain.step(rank.index());
  synchronize_device();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count() / kSteps;
}

}  // namespace

TEST_CASE("a chain trains in symmetric memory as the plain one does, or is refused by name",
          "[gpu][symmetric][symmetric_training]") {
  if (is_refused()) return;
  CHECK(on_ranks(all_ranks(), [](Rank& rank) {
    ShardedChain chain(rank.mesh(), 4, kWide);
    use_symmetric_memory(chain);
    for (int step = 0; step < 3; ++step) train_one_step(rank, chain, step);
    chain.model->skipped = {1};  // another order than the one it has learned
    chain.step(rank.index(), 3);
    chain.model->skipped = {};
    train_one_step(rank, chain, 4);
    tell_bytes(rank, chain, "symmetric memory of a chain");
  }));
}

TEST_CASE("packed gradients are reduced out of symmetric memory: bfloat16 with float sums", "[gpu][symmetric]") {
  if (is_refused()) return;
  Training training{.world_size = all_ranks(), .param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  CHECK(trains_like_plain(
      [] {
        auto workload = chain_workload(4, kWide);
        auto module = workload.module;
        workload.shard = [module, shard = workload.shard](const FullyShardOptions& options) {
          shard(options);
          for (const auto& inner : module->modules())
            if (auto sharded = find_fsdp_module(*inner)) sharded->set_symm_mem_for_comm();
        };
        return workload;
      },
      training));
}

TEST_CASE("after an abort the windows of a group go, and another group trains in symmetric memory", "[gpu][symmetric]") {
  if (is_refused()) return;
  for (int turn = 0; turn < 2; ++turn)
    CHECK(on_ranks(all_ranks(), [&](Rank& rank) {
      ShardedChain chain(rank.mesh(), 3, kWide);
      use_symmetric_memory(chain);
      train_one_step(rank, chain, 0);
      if (turn > 0) return;
      rank.world()->abort("on purpose");
      std::string error;
      try {
        chain.step(rank.index(), 1);
        synchronize_device();
        chain.step(rank.index(), 2);
      } catch (const std::exception& thrown) {
        error = thrown.what();
      }
      rank.check(error.find("on purpose") != std::string::npos, "the abort's reason, found: " + error);
    }));
}

TEST_CASE("a captured step goes on using its slots", "[gpu][symmetric]") {
  if (is_refused()) return;
  CHECK(on_ranks(all_ranks(), [](Rank& rank) {
    ShardedChain chain(rank.mesh(), 3, kWide);
    use_symmetric_memory(chain);
    const auto input = Inputs(rank.index(), 0).normal({4, kWide});
    const auto replay = captured([&] {
      chain.model->zero_grad();
      chain.model->forward(input).square().mean().backward();
    });
    auto plain = plain_chain(3, kWide);
    for (int turn = 0; turn < 2; ++turn) {
      input.copy_(Inputs(rank.index(), turn).normal({4, kWide}));
      synchronize_device();
      replay();
      synchronize_device();
      check_gradients(rank, *chain.model, averaged_gradients(plain, rank.size(), turn), fmt::format("replay {}", turn));
    }
  }));
}

TEST_CASE("what symmetric memory is worth: a step with it and without", "[gpu][symmetric]") {
  if (is_refused()) return;
  constexpr int64_t kVeryWide = 2048;
  CHECK(on_ranks(all_ranks(), [](Rank& rank) {
    double ms[2] = {};
    for (const bool is_symmetric : {false, true}) {
      ShardedChain chain(rank.mesh(), 8, kVeryWide);
      if (is_symmetric) use_symmetric_memory(chain);
      ms[is_symmetric] = step_ms(rank, chain);
    }
    rank.check(ms[0] > 0 && ms[1] > 0, "both were timed");
    if (rank.index() == 0)
      tell_figure("a step of 8 layers of 16 MiB", fmt::format("\"ms\": {:.3f}, \"symmetric_ms\": {:.3f}", ms[0], ms[1]));
  }));
}

}  // namespace fsdp::test
