// Models that are gathered into NCCL's symmetric memory, over functions that stand in for NCCL's and note every gather
// that is not in the same place of the same window on all ranks.
#include <catch2/catch.hpp>

#include "module/handles.hpp"
#include "module/state/module_state.hpp"
#include "nccl_training.hpp"

namespace fsdp::test {
namespace {

using namespace std::chrono_literals;
using Catch::Contains;

constexpr int64_t kWidth = kChainWidth;
constexpr int64_t kLayer = (kWidth + 1) * kWidth * 4;
constexpr int64_t kBlock = kNcclBlock;

/// On two ranks, of the root's head, all of which is packed: a piece is a row of weights and, of one element, a bias
/// that takes 16 bytes.
int64_t head_bytes(int64_t itemsize) { return 2 * (kWidth * itemsize + 16); }

/// On two ranks: two slots for the layers, each with its bias once more, which is packed, one for the root's head, and
/// one for gradients, of which those of the head and of biases are packed.
int64_t symmetric_bytes(int64_t itemsize) {
  const int64_t layer = (kWidth * kWidth + 2 * kWidth) * itemsize;
  return 2 * layer + 2 * head_bytes(itemsize) + head_bytes(itemsize);
}

}  // namespace

TEST_CASE("a model trains in symmetric memory as the plain one does", "[group][nccl_slots]") {
  for (const int world_size : {2, 3}) {
    const NcclSubstitute nccl({.polls = 1});
    const auto errors = errors_on_nccl(
        nccl, {.world_size = world_size, .streams = {.max_delay = 300us}}, [&](NcclRank& rank) {
          ShardedChain chain(mesh_of(rank), 4, kWidth);
          use_symmetric_memory(chain);
          for (int step = 0; step < 3; ++step) train(chain, rank, step);
          chain.model->skipped = {1};  // another order than the one it has learned
          for (int step = 3; step < 5; ++step) train(chain, rank, step);
        });
    CHECK(errors == no_errors(world_size));
    // Two slots in which the layers take turns, one for what the root holds, which stays after forward, and one for
    // gradients.
    CHECK(nccl.counts().windows == nccl.slots(4 * world_size));
    // Of what lies in them NCCL leaves nothing to its other kernels.
    CHECK(nccl.counts().symmetric_kernels == nccl.counts().windowed_gathers + nccl.counts().windowed_reductions);
    CHECK((nccl.counts().symmetric_kernels > 0) == nccl.has_slots());
    CHECK(nccl.counts().bytes == 0);
    CHECK(nccl.misuses().empty());
  }
}

TEST_CASE("every gather goes to a window, and slots have the bytes of the plan", "[group][nccl_slots]") {
  const NcclSubstitute nccl;
  const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
    ShardedChain chain(mesh_of(rank), 4, kWidth);
    use_symmetric_memory(chain);
    expect(parameter_bytes(chain.root[0]).symmetric == 0, "none before the first gather");
    train(chain, rank, 0);
    const int64_t bytes = parameter_bytes(chain.root[0]).symmetric;
    expect(bytes == nccl.slots(symmetric_bytes(4)), fmt::format("{} bytes by hand, not {}", symmetric_bytes(4), bytes));
    wait_for_all(rank);
    expect(nccl.counts().bytes == nccl.slots(2 * 4 * kBlock), "as NCCL counts them, on both ranks");
    const auto before = nccl.counts();
    wait_for_all(rank);
    const auto gathers_before = statistics(chain.root[0]).all_gathers;
    train(chain, rank, 1);
    wait_for_all(rank);
    const auto now = nccl.counts();
    const auto gathers = statistics(chain.root[0]).all_gathers - gathers_before;
    expect(now.windows == before.windows, "no more windows");
    // Of the layers a weight and a bias travel, of the head one packed piece.
    expect(now.windowed_gathers - before.windowed_gathers == nccl.slots(2 * (2 * gathers - 1)),
           fmt::format("{} collectives into windows for {} gathers on each rank",
                       now.windowed_gathers - before.windowed_gathers, gathers));
    wait_for_all(rank);
  });
  CHECK(errors == no_errors(2));
  CHECK(nccl.misuses().empty());
}

namespace {

/// What the scheduler believes of each group is so.
void expect_known(ShardedChain& chain, const std::string& when) {
  auto& root = *handles::state(chain.root[0]).context();
  for (const auto* group : root.runner().groups()) {
    const auto state = group->unsharder().state();
    const auto real = is_unsharded(state)    ? Residency::kUnsharded
                      : is_unsharding(state) ? Residency::kUnsharding
                                             : Residency::kReleased;
    expect(root.runner().scheduler().groups()[group->identity().id].residency == real, when + ": " + group->name());
  }
}

}  // namespace

TEST_CASE("the scheduler knows where groups are, in slots and beside them", "[group][nccl_slots]") {
  for (const int distance : {0, 1, 2}) {
    const NcclSubstitute nccl({.polls = 1});
    const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
      ShardedChain chain(mesh_of(rank), 5, kWidth);
      chain.root[0].set_prefetch_distance(distance);
      chain.root[0].set_symm_mem_for_comm();
      for (size_t layer = 0; layer < chain.layers.size(); layer += 2) chain.layers[layer].set_symm_mem_for_comm();
      for (int step = 0; step < 4; ++step) {
        if (step == 3) chain.model->skipped = {1};
        const auto loss = chain.loss(rank.world->rank(), step);
        expect_known(chain, fmt::format("behind forward {}", step));
        loss.backward();
        expect_known(chain, fmt::format("behind backward {}", step));
        at::NoGradGuard no_grad;
        for (const auto& layer : chain.model->layers) {
          layer->weight.sum();
          expect_known(chain, "behind a read");
        }
      }
    });
    CHECK(errors == no_errors(2));
    CHECK(nccl.misuses().empty());
  }
}

TEST_CASE("in the usual order nothing moves, however many groups are gathered ahead", "[group][nccl_slots]") {
  for (const int distance : {0, 1, 2}) {
    const NcclSubstitute nccl;
    const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
      const auto buffer_bytes = [&](bool is_symmetric) {
        ShardedChain chain(mesh_of(rank), 5, kWidth);
        chain.root[0].set_prefetch_distance(distance);
        if (is_symmetric) use_symmetric_memory(chain);
        for (int step = 0; step < 2; ++step) train(chain, rank, step);
        const auto before = statistics(chain.root[0]);
        for (int step = 2; step < 4; ++step) train(chain, rank, step);
        const auto now = statistics(chain.root[0]);
        // Each step gathers the head once, and layers.
        const int64_t layers = now.all_gathers - before.all_gathers - 2;
        const int64_t gathered = layers * (kLayer + kWidth * 4) + 2 * 2 * head_bytes(4);
        // Biases and the head are packed.
        const int64_t reduced = 2 * (5 * kWidth * 4 + head_bytes(4));
        return now.buffer_bytes - before.buffer_bytes + (is_symmetric ? nccl.slots(gathered + reduced) : 0);
      };
      const int64_t plain = buffer_bytes(false), symmetric = buffer_bytes(true);
      expect(symmetric == plain, fmt::format("{} bytes where {} are made without slots", symmetric, plain));
    });
    CHECK(errors == no_errors(2));
    CHECK(nccl.counts().windows == nccl.slots(2 * (1 + distance + 1 + 1)));
    CHECK(nccl.misuses().empty());
  }
}

TEST_CASE("what stays unsharded beyond its turn moves to memory of its own, on the rank that keeps it",
          "[group][nccl_slots]") {
  const NcclSubstitute nccl;
  const auto errors = errors_on_nccl(nccl, {.streams = {.max_delay = 300us}}, [&](NcclRank& rank) {
    ShardedChain chain(mesh_of(rank), 4, kWidth);
    use_symmetric_memory(chain);
    train(chain, rank, 0);
    const auto plain = plain_chain(4, kWidth);
    const auto shows = [&](size_t layer) {
      at::NoGradGuard no_grad;
      return chain.model->layers[layer]->weight.equal(plain->layers[layer]->weight) &&
             chain.model->layers[layer]->bias.equal(plain->layers[layer]->bias);
    };
    for (const bool is_kept_here : {true, rank.world->rank() == 0}) {
      const int64_t before = statistics(chain.root[0]).buffer_bytes;
      for (size_t i = 0; i < 2; ++i) chain.layers[i].unshard();
      if (!is_kept_here)
        for (size_t i = 0; i < 2; ++i) chain.layers[i].reshard();
      for (size_t i = 2; i < 4; ++i) chain.layers[i].unshard();
      const int64_t moved = statistics(chain.root[0]).buffer_bytes - before;
      if (nccl.has_slots())
        expect(moved == (is_kept_here ? 2 * kLayer : 0), fmt::format("{} bytes have moved", moved));
      if (is_kept_here) expect(shows(0) && shows(1), "what has moved is what it was");
      expect(shows(2) && shows(3), "what is in the slots now");
      for (auto& layer : chain.layers) layer.reshard();
      train(chain, rank, 1);
    }
  });
  CHECK(errors == no_errors(2));
  CHECK(nccl.counts().windows == nccl.slots(4 * 2));
  CHECK(nccl.misuses().empty());
}

TEST_CASE("a gather that is given up leaves its slot to the next", "[group][nccl_slots]") {
  const NcclSubstitute nccl;
  const auto errors = errors_on_nccl(nccl, {.streams = {.max_delay = 1ms}}, [&](NcclRank& rank) {
    ShardedChain chain(mesh_of(rank), 4, kWidth);
    use_symmetric_memory(chain);
    for (int step = 0; step < 4; ++step) {
      for (auto& layer : chain.layers) {
        auto handle = layer.unshard_async();
        layer.reshard();
      }
      train(chain, rank, step);
    }
  });
  CHECK(errors == no_errors(2));
  CHECK(nccl.misuses().empty());
}

TEST_CASE("a group that goes amid its gather leaves its slot to the next", "[group][nccl_slots]") {
  const NcclSubstitute nccl;
  const auto errors = errors_on_nccl(nccl, {.streams = {.max_delay = 1ms}}, [&](NcclRank& rank) {
    for (int round = 0; round < 4; ++round) {
      ShardedChain chain(mesh_of(rank), 4, kWidth);
      use_symmetric_memory(chain);
      train(chain, rank, 0);
      // The first and the third layer are in one slot.
      const int64_t before = parameter_bytes(chain.root[0]).sharded;
      (void)chain.layers[0].unshard_async();
      chain.layers.erase(chain.layers.begin());
      chain.model->layers[0] = chain.model->replace_module("layer0", torch::nn::Linear(kWidth, kWidth));
      expect(parameter_bytes(chain.root[0]).sharded < before, "the first layer is gone");
      chain.layers[1].unshard();
      at::NoGradGuard no_grad;
      const auto plain = plain_chain(4, kWidth);
      expect(chain.model->layers[2]->weight.equal(plain->layers[2]->weight), "the third layer's values");
    }
  });
  CHECK(errors == no_errors(2));
  CHECK(nccl.misuses().empty());
}

TEST_CASE("another dtype is another plan, with new slots in place of the old", "[group][nccl_slots]") {
  const NcclSubstitute nccl;
  const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
    ShardedChain chain(mesh_of(rank), 4, kWidth);
    use_symmetric_memory(chain);
    train(chain, rank, 0);
    to(*chain.model, at::kDouble);
    Inputs inputs(rank.world->rank(), 1);
    chain.model->forward(inputs.normal({4, kWidth}).to(at::kDouble)).square().mean().backward();
    expect(parameter_bytes(chain.root[0]).symmetric == nccl.slots(symmetric_bytes(8)), "slots for double");
    wait_for_all(rank);
    expect(nccl.counts().bytes == nccl.slots(2 * 4 * kBlock), "and none of the old ones");
    wait_for_all(rank);
  });
  CHECK(errors == no_errors(2));
  CHECK(nccl.counts().windows == nccl.slots(2 * 4 * 2));
  CHECK(nccl.misuses().empty());
}

TEST_CASE("storage that is kept is a slot of its own, at one address", "[group][nccl_slots]") {
  const NcclSubstitute nccl;
  const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
    ShardedChain chain(mesh_of(rank), 4, kWidth);
    use_symmetric_memory(chain);
    chain.root[0].set_keep_unsharded_storage(true);
    std::vector<const void*> first;
    for (int step = 0; step < 3; ++step) {
      train(chain, rank, step);
      for (size_t i = 0; i < chain.layers.size(); ++i) {
        chain.layers[i].unshard();
        const void* now = chain.model->layers[i]->weight.const_data_ptr();
        if (step == 0) first.push_back(now);
        expect(now == first[i], fmt::format("layer {} is where it was", i));
      }
      for (auto& layer : chain.layers) layer.reshard();
    }
    expect((parameter_bytes(chain.root[0]).kept == 0) == nccl.has_slots(), "nothing beside the slots");
  });
  CHECK(errors == no_errors(2));
  CHECK(nccl.counts().windows == nccl.slots(2 * 6));
  CHECK(nccl.misuses().empty());
}

TEST_CASE("without windows a model trains in plain memory", "[group][nccl_slots]") {
  const NcclSubstitute nccl({.has_windows = false});
  const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
    ShardedChain chain(mesh_of(rank), 4, kWidth);
    use_symmetric_memory(chain);
    for (int step = 0; step < 3; ++step) train(chain, rank, step);
    expect(parameter_bytes(chain.root[0]).symmetric == 0, "no such memory");
  });
  CHECK(errors == no_errors(2));
  CHECK(nccl.counts().windowed_gathers == 0);
  CHECK(nccl.counts().windowed_reductions == 0);
  CHECK(nccl.counts().bytes == 0);
  CHECK(nccl.misuses().empty());
}

TEST_CASE("gathers over some of the ranks, from forward to backward, are not in slots", "[group][nccl_slots]") {
  const NcclSubstitute nccl;
  const auto errors = errors_on_nccl(nccl, {.world_size = 4}, [&](NcclRank& rank) {
    ShardedChain chain(mesh_of(rank), 3, kWidth, 2);
    use_symmetric_memory(chain);
    for (int step = 0; step < 3; ++step) train(chain, rank, step);
  });
  CHECK(errors == no_errors(4));
  CHECK(nccl.misuses().empty());
}

TEST_CASE("a rank that ends amid a step leaves nothing registered or allocated on any", "[group][nccl_slots]") {
  const NcclSubstitute nccl;
  const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
    ShardedChain chain(mesh_of(rank), 4, kWidth);
    use_symmetric_memory(chain);
    train(chain, rank, 0);
    chain.model->after_layer = [&](int layer) {
      if (layer == 2 && rank.world->rank() == 1) throw UsageError("a layer of the user's went wrong");
    };
    train(chain, rank, 1);
  });
  CHECK_THAT(errors[0], Contains("ended by an exception"));
  CHECK_THAT(errors[1], Contains("went wrong"));
  CHECK(nccl.counts().bytes == 0);
  CHECK(nccl.misuses().empty());
}

TEST_CASE("two models have slots of their own, which go with them", "[group][nccl_slots]") {
  const NcclSubstitute nccl;
  const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
    ShardedChain chain(mesh_of(rank), 3, kWidth);
    use_symmetric_memory(chain);
    train(chain, rank, 0);
    {
      ShardedChain other(mesh_of(rank), 3, kWidth);
      use_symmetric_memory(other);
      train(other, rank, 1);
      train(chain, rank, 2);
      wait_for_all(rank);
      expect(nccl.counts().bytes == nccl.slots(2 * 2 * 4 * kBlock), "two models' slots");
      wait_for_all(rank);
    }
    wait_for_all(rank);
    expect(nccl.counts().bytes == nccl.slots(2 * 4 * kBlock), "one's, when the other is gone");
    wait_for_all(rank);
  });
  CHECK(errors == no_errors(2));
  CHECK(nccl.misuses().empty());
}

TEST_CASE("memory from the process group is this memory, and goes when it is switched off", "[group][nccl_slots]") {
  const NcclSubstitute nccl;
  const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
    ShardedChain chain(mesh_of(rank), 4, kWidth);
    const auto set = [&](bool enable) {
      chain.root[0].set_allocate_memory_from_process_group_for_comm(enable, Recurse::kYes);
    };
    for (int round = 0; round < 2; ++round) {
      set(true);
      train(chain, rank, 2 * round);
      expect((parameter_bytes(chain.root[0]).symmetric > 0) == nccl.has_slots(), "slots");
      set(false);
      expect(parameter_bytes(chain.root[0]).symmetric == 0, "none");
      wait_for_all(rank);
      expect(nccl.counts().bytes == 0, "freed");
      wait_for_all(rank);
      train(chain, rank, 2 * round + 1);
    }
  });
  CHECK(errors == no_errors(2));
  CHECK(nccl.counts().windows == nccl.slots(2 * 2 * 4));
  CHECK(nccl.misuses().empty());
}

TEST_CASE("symmetric memory is refused beside custom collectives", "[group][nccl_slots]") {
  const NcclSubstitute nccl;
  std::vector<std::string> found(2);
  const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
    ShardedChain chain(mesh_of(rank), 2, kWidth);
    auto& root = chain.root[0];
    auto& text = found[rank.world->rank()];
    const auto note = [&](const std::function<void()>& call) {
      try {
        call();
      } catch (const UsageError& error) {
        text += error.what() + std::string("\n");
      }
    };
    root.set_custom_all_gather(std::make_shared<AllGatherComm>());
    note([&] { root.set_symm_mem_for_comm(); });
    root.set_custom_all_gather(nullptr);
    root.set_symm_mem_for_comm();
    train(chain, rank, 0);
  });
  CHECK(errors == no_errors(2));
  for (const std::string& text : found)
    CHECK_THAT(text, Contains("has a custom all-gather"));
}

}  // namespace fsdp::test
