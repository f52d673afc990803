// Training over the native NCCL communicator, against the plain model on the same device.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <cstdlib>

#include "fsdp/checkpoint.hpp"
#include "native_device.hpp"
#include "native_world.hpp"
#include "support/models.hpp"

namespace fsdp::test {
namespace {

int ranks() { return rank_processes().value_or(1); }

/// Parts of one rank are packed with others, or travel from where they are.
MakeWorkload chain_of_width(int64_t width) {
  return [width] { return chain_workload(4, width); };
}

struct NamedTraining {
  const char* name;
  Training training;
};

std::vector<NamedTraining> trainings() {
  const int all = ranks();
  return {
      {"sharded over all", {}},
      {"one replica of all ranks", {.replicas = 1}},
      {"a replica a rank", {.replicas = all}},
      {"replicated, not sharded", {.replicate_only = true}},
      {"kept after forward", {.reshard_after_forward = false}},
      {"two groups ahead, clipped", {.prefetch_distance = 2, .max_norm = 0.5}},
      {"accumulated, reduced at the last", {.micro_batches = 2, .accumulation = Accumulation::kSyncAtLast}},
      {"reductions apart", {.separate_reductions = ReduceScatterStart::kBySize}},
      {"bfloat16 with float sums", {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}},
      {"flat", {.adjust = [](FullyShardOptions& options) { options.layout = ParamLayout::kFlat; }}},
      {"a byte budget", {.budget_factor = 1.5}},
  };
}

}  // namespace

TEST_CASE("chains train as plain ones do: sharded, hybrid 1 x N and N x 1, replicated", "[gpu][training]") {
  for (auto [name, training] : trainings())
    for (const int64_t width : {6, 256}) {
      CAPTURE(name, width);
      training.world_size = ranks();
      CHECK(trains_like_plain(chain_of_width(width), training));
    }
}

TEST_CASE("offloaded chains train as plain ones do, pinned or not", "[gpu][offload]") {
  for (const bool is_pinned : {true, false}) {
    Training training{.world_size = ranks()};
    training.adjust = [&](FullyShardOptions& options) { options.offload_policy = CPUOffloadPolicy{.pin_memory = is_pinned}; };
    CHECK(trains_like_plain(chain_of_width(256), training));
  }
}

TEST_CASE("a checkpoint of shards is read by replicas, and training goes on as it would have", "[gpu][checkpoint]") {
  const auto folder = std::string(std::getenv("FSDP_TEST_STORE")) + ".checkpoint";
  CHECK(on_ranks(ranks(), [&](Rank& rank) {
    const auto replicas = rank.hybrid(rank.size(), 1);
    ShardedChain saved(rank.mesh(), 3, 256), loaded(replicas, 3, 256);
    torch::optim::AdamW first(saved.model->parameters(), 1e-2), second(loaded.model->parameters(), 1e-2);
    const auto step = [&](ShardedChain& chain, torch::optim::Optimizer& optimizer, int number) {
      optimizer.zero_grad();
      auto loss = chain.loss(rank.index(), number);
      loss.backward();
      optimizer.step();
      return loss.detach();
    };
    for (int number = 0; number < 2; ++number) step(saved, first, number);
    save_checkpoint(folder, {saved.model, first}, {.world = rank.world()});
    load_checkpoint(folder, {loaded.model, second}, {.world = rank.world()});
    for (int number = 2; number < 4; ++number)
      rank.check_close(step(loaded, second, number), step(saved, first, number), fmt::format("loss of step {}", number));
    const auto one = state_dict(*saved.model), other = state_dict(*loaded.model);
    for (const auto& entry : one.entries)
      rank.check_close(other.find(entry.key())->value, entry.value().value, entry.key());
  }));
}

TEST_CASE("a reduction that is held back behind a gather holds back no compute", "[gpu][streams]") {
  if (!is_on_gpu()) return skip("the CPU has no streams");
  const auto group = group_of_all(), reductions = group_of_all();
  const c10::impl::VirtualGuardImpl device(test_device());
  const auto gathers_from = device.getStreamFromGlobalPool(device.getDevice());
  const auto reduces_from = device.getStreamFromGlobalPool(device.getDevice());
  auto whole = at::zeros({group->size() << 20}, on_device()), piece = at::zeros({1 << 20}, on_device());
  const auto own = at::ones({1 << 20}, on_device());
  auto compute = at::zeros({1}, on_device());
  // Both connect now, for which the host waits.
  group->start_all_gather(whole, own, "first")->wait();
  reductions->start_reduce_scatter(piece, whole, ReduceOp::kSum, "first")->wait();
  synchronize_device();
  std::shared_ptr<Work> gather, reduction;
  {
    const c10::StreamGuard guard(gathers_from);
    spin(2000);
    gather = group->start_all_gather(whole, own, "gather");
  }
  {
    const c10::StreamGuard guard(reduces_from);
    REQUIRE(gather->hold_back(*reductions));
    reduction = reductions->start_reduce_scatter(piece, whole, ReduceOp::kSum, "reduction");
  }
  compute += 1;
  device.synchronizeStream(device.getStream(device.getDevice()));
  CHECK_FALSE(gather->is_completed());
  CHECK_FALSE(reduction->is_completed());
  gather->wait();
  reduction->wait();
  CHECK(at::equal(piece, at::full({1 << 20}, static_cast<float>(group->size()), on_device())));
}

}  // namespace fsdp::test
