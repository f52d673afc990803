#include <catch2/catch.hpp>

#include <atomic>
#include <filesystem>
#include <thread>

#include "ended_ranks.hpp"
#include "support/scoped_environment.hpp"

// Ranks that disagree, that are late, or that have gone: what each of them is told.

namespace fsdp::test {
namespace {

using Catch::Contains;
using Catch::StartsWith;
using std::chrono::milliseconds;

int64_t threads_of_process() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
}

}  // namespace

TEST_CASE("ranks that take other branches of the same sizes are told after the first step",
          "[group][schedule_check]") {
  // The sizes agree, so that no collective fails: without the check the sums would just be wrong.
  for (const int ranks : {2, 3}) {
    const auto outcome = outcome_of(ranks, [](const auto& world) {
      ShardedChain chain(mesh_over(world));
      set_schedule_check(chain.root[0], soon());
      chain.model->skipped = {world->rank() == 1 ? size_t{2} : size_t{1}};
      take_steps(chain, world->rank());
    });
    outcome.all_say({"disagree about collective 1",
                     ranks == 2 ? "rank 0: all_gather of layer2 (192 bytes, Float) over 2 ranks"
                                : "ranks 0, 2: all_gather of layer2",
                     "rank 1: all_gather of layer1", "in common before it:\n  0: all_gather of layer0"});
    for (const auto& difference : outcome.differences) {
      CHECK(difference.collective == 1);
      REQUIRE(difference.launched.size() == static_cast<size_t>(ranks));
      CHECK_THAT(difference.launched.at(0), StartsWith("all_gather of layer2 (192 bytes, Float) over"));
      CHECK_THAT(difference.launched.at(1), StartsWith("all_gather of layer1"));
    }
  }
}

TEST_CASE("ranks that change their order differently are told after that step", "[group][schedule_check]") {
  const auto outcome = outcome_of(2, [](const auto& world) {
    ShardedChain chain(mesh_over(world));
    set_schedule_check(chain.root[0], soon());
    take_steps(chain, world->rank(), 4);
    chain.model->skipped = {world->rank() == 1 ? size_t{2} : size_t{1}};
    take_steps(chain, world->rank());
  });
  outcome.all_say({"rank 0: reduce_scatter of layer2", "rank 1: reduce_scatter of layer1", "in common before it"});
}

TEST_CASE("an order that changes on one rank alone is told, though nothing fails", "[group][schedule_check]") {
  const auto outcome = outcome_of(3, [](const auto& world) {
    ShardedChain chain(mesh_over(world));
    set_schedule_check(chain.root[0], soon());
    chain.root[0].set_prefetch_distance(0);  // so that operations and sizes stay the same
    chain.model->skipped = {1};
    take_steps(chain, world->rank(), 4);
    if (world->rank() == 2) chain.model->skipped = {2};
    take_steps(chain, world->rank());
  });
  outcome.all_say({"ranks 0, 1: all_gather of layer2", "rank 2: all_gather of layer1"});
}

TEST_CASE("ranks whose collectives do not fit are told of the schedule, not of the sizes",
          "[group][schedule_check]") {
  const auto outcome = outcome_of(3, [](const auto& world) {
    ShardedChain chain(mesh_over(world));
    set_schedule_check(chain.root[0], soon());
    if (world->rank() == 1) chain.model->skipped = {2};
    take_steps(chain, world->rank());
  });
  outcome.all_say({"disagree about collective 2", "ranks 0, 2: all_gather of layer2 (192 bytes",
                   "rank 1: all_gather of root (144 bytes"});
}

TEST_CASE("where a gradient norm fails, the ranks are told of the schedule, too", "[group][schedule_check]") {
  const auto outcome = outcome_of(2, [](const auto& world) {
    ShardedChain chain(mesh_over(world));
    set_schedule_check(chain.root[0], soon());
    chain.model->skipped = {world->rank() == 1 ? size_t{2} : size_t{1}};
    take_steps(chain, world->rank(), 1);
    const double norm_type = world->rank() == 1 ? std::numeric_limits<double>::infinity() : 2;
    clip_grad_norm_(chain.model->parameters(), /*max_norm=*/1, norm_type);
  });
  outcome.all_say({"disagree about collective 1", "rank 0: all_gather of layer2", "rank 1: all_gather of layer1"});
}

TEST_CASE("models of other shapes are told by bytes", "[group][schedule_check]") {
  const auto outcome = outcome_of(2, [](const auto& world) {
    ShardedChain chain(mesh_over(world), 3, world->rank() == 1 ? 8 : 6);
    set_schedule_check(chain.root[0], soon());
    take_steps(chain, world->rank());
  });
  outcome.all_say({"disagree about collective 0", "rank 0: all_gather of layer0 (", "rank 1: all_gather of layer0 ("});
}

struct TwoWeights : torch::nn::Module {
  TwoWeights() {
    first = register_parameter("first", torch::ones({4, 3}));
    second = register_parameter("second", torch::ones({4, 3}));
  }
  at::Tensor first, second;
};

TEST_CASE("gradients of other parameters on some ranks are told by name", "[group][schedule_check]") {
  const auto outcome = outcome_of(2, [](const auto& world) {
    TwoWeights model;
    const auto root = fully_shard(model, {.mesh = mesh_over(world)});
    set_schedule_check(root, soon());
    for (int step = 0; step < 1000; ++step) {
      (world->rank() == 0 ? model.first : model.second).sum().backward();
      std::this_thread::sleep_for(milliseconds(5));
    }
  });
  outcome.all_say({"rank 0: reduce_scatter of root (48 bytes, Float, of first alone)",
                   "rank 1: reduce_scatter of root (48 bytes, Float, of second alone)",
                   "set_reduce_scatter_unused_params(true)"});
}

TEST_CASE("a rank without any gradient for a group is told", "[group][schedule_check]") {
  const auto outcome = outcome_of(2, [](const auto& world) {
    ShardedChain chain(mesh_over(world));
    set_schedule_check(chain.root[0], soon());
    if (world->rank() == 1)
      for (auto& parameter : chain.model->layers[1]->parameters()) parameter.requires_grad_(false);
    take_steps(chain, world->rank());
  });
  outcome.all_say({"rank 0: reduce_scatter of layer1", "rank 1: "});
}

TEST_CASE("a read on one rank only is told", "[group][schedule_check]") {
  const auto outcome = outcome_of(2, [](const auto& world) {
    ShardedChain chain(mesh_over(world));
    set_schedule_check(chain.root[0], soon());
    take_steps(chain, world->rank(), 2);
    if (world->rank() == 0) {
      at::NoGradGuard no_grad;
      chain.model->layers[2]->weight.norm();
    }
    take_steps(chain, world->rank());
  });
  outcome.all_say({"rank 0: all_gather of layer2", "rank 1: all_gather of layer0", "in common before it"});
}

TEST_CASE("every rank of a hybrid mesh is told, whichever groups it is in", "[group][schedule_check]") {
  for (const int wrong : {0, 3}) {
    const auto outcome = outcome_of(4, [&](const auto& world) {
      ShardedChain chain(init_device_mesh(world, {2, 2}, {"replicate", "shard"}));
      set_schedule_check(chain.root[0], soon());
      chain.model->skipped = {world->rank() == wrong ? size_t{2} : size_t{1}};
      take_steps(chain, world->rank());
    });
    outcome.all_say({wrong == 0 ? "ranks 1-3: all_gather of layer2" : "ranks 0-2: all_gather of layer2",
                     fmt::format("rank {}: all_gather of layer1", wrong)});
  }
}

TEST_CASE("a mesh over a part of the world is checked by itself", "[group][schedule_check]") {
  // Two models side by side, over ranks 0 and 2 and over 1 and 3. Those of the second disagree.
  const auto parts = outcome_of(4, [](const auto& world) {
    const auto even = world->split(std::vector<int>{0, 2}, "even");
    const auto odd = world->split(std::vector<int>{1, 3}, "odd");
    ShardedChain chain(mesh_over(world->rank() % 2 ? odd : even), world->rank() % 2 ? 2 : 3);
    set_schedule_check(chain.root[0], soon());
    if (world->rank() == 3) chain.model->skipped = {0};
    if (world->rank() == 1) chain.model->skipped = {1};
    take_steps(chain, world->rank(), world->rank() % 2 ? 1000 : 20);
  });
  CHECK(parts.messages[0].empty());
  CHECK(parts.messages[2].empty());
  CHECK(parts.messages[1] == parts.messages[3]);
  CHECK_THAT(parts.messages[1], Contains("rank 1: all_gather of layer0") && Contains("rank 3: all_gather of layer1"));
}

TEST_CASE("ranks that begin with different roots are told", "[group][schedule_check]") {
  const auto outcome = outcome_of(2, [](const auto& world) {
    const auto mesh = mesh_over(world);
    ShardedChain one(mesh, 2), other(mesh, 4);
    for (auto* chain : {&one, &other}) set_schedule_check(chain->root[0], soon());
    for (int step = 0; step < 300; ++step) {
      (world->rank() == 0 ? one : other).step(world->rank(), step);
      (world->rank() == 0 ? other : one).step(world->rank(), step);
      std::this_thread::sleep_for(milliseconds(5));
    }
  });
  outcome.all_say({"rank 0: all_gather of", "rank 1: all_gather of"});
}

TEST_CASE("a rank whose model has gone ends the wait of the others before the timeout",
          "[group][schedule_check]") {
  const auto outcome = outcome_of(3, [](const auto& world) {
    ShardedChain chain(mesh_over(world));
    set_schedule_check(chain.root[0], {.late_after = on_this_machine(milliseconds(600)), .compare_after = milliseconds(50)});
    take_steps(chain, world->rank(), world->rank() == 1 ? 2 : 3);
  });
  CHECK(outcome.messages[1].empty());
  for (const size_t rank : {0, 2}) {
    CHECK(outcome.is_schedule_error[rank]);
    CHECK(outcome.messages[rank] == outcome.messages[0]);
  }
  CHECK_THAT(outcome.messages[0], Contains("rank 1 has ended before the others") &&
                                      Contains("all_gather of layer0 cannot complete") &&
                                      Contains("last launched"));
  CHECK(outcome.time < patience());
}

TEST_CASE("a collective that is late is reported: who is where, and the last collectives",
          "[group][schedule_check]") {
  std::atomic<bool> is_over = false;
  const auto timeout = on_this_machine(milliseconds(2500));
  const auto outcome = outcome_of(
      2,
      [&](const auto& world) {
        ShardedChain chain(mesh_over(world));
        set_schedule_check(chain.root[0], {.late_after = timeout / 4, .compare_after = milliseconds(50)});
        take_steps(chain, world->rank(), 2);
        while (world->rank() == 1 && !is_over) std::this_thread::sleep_for(milliseconds(5));
        struct Over {
          std::atomic<bool>& flag;
          ~Over() { flag = true; }
        } over{is_over};
        if (world->rank() == 0) take_steps(chain, 0, 1);
      },
      timeout);
  CHECK_FALSE(outcome.is_schedule_error[0]);  // the ranks agree so far
  CHECK_THAT(outcome.messages[0],
             Contains(fmt::format("timed out after {} ms", timeout.count())) &&
                 Contains("all_gather of layer0 is late: rank 0 has waited") &&
                 Contains("rank 0: waits for all_gather of layer0; last launched 20: all_gather of layer0") &&
                 Contains("rank 1: in no collective of this model; last launched 19: reduce_scatter of layer0") &&
                 Contains("the last collectives:\n  11: "));
}

TEST_CASE("a rank that is late but comes changes nothing", "[group][schedule_check]") {
  const auto outcome = outcome_of(2, [](const auto& world) {
    ShardedChain chain(mesh_over(world));
    set_schedule_check(chain.root[0], {.late_after = milliseconds(150), .compare_after = milliseconds(20)});
    for (int step = 0; step < 4; ++step) {
      if (world->rank() == step % 2) std::this_thread::sleep_for(milliseconds(400));
      chain.step(world->rank(), step);
    }
  });
  outcome.none_says_anything();
}

TEST_CASE("with DETAIL no rank gets further than the difference", "[group][schedule_check]") {
  const ScopedEnvironment environment(Variables{{"TORCH_DISTRIBUTED_DEBUG", "DETAIL"}});
  std::vector<std::vector<std::string>> calls(2);
  const auto outcome = outcome_of(2, [&](const auto& plain_world) {
    const auto log = std::make_shared<CallLog>();
    const auto world = recording(plain_world, log);
    ShardedChain chain(mesh_over(world));
    set_schedule_check(chain.root[0], soon());
    chain.model->skipped = {world->rank() == 1 ? size_t{2} : size_t{1}};
    try {
      chain.step(world->rank());
    } catch (const CommError&) {
      calls[static_cast<size_t>(world->rank())] = log->names();
      throw;
    }
  });
  outcome.all_say({"disagree about collective 1", "rank 0: all_gather of layer2", "rank 1: all_gather of layer1"});
  for (const auto& launched : calls) CHECK(launched == std::vector<std::string>{"all_gather layer0"});
}

TEST_CASE("with DETAIL ranks that agree train as ever", "[group][schedule_check]") {
  const ScopedEnvironment environment(Variables{{"TORCH_DISTRIBUTED_DEBUG", "detail"}});
  const MakeWorkload make = [] { return chain_workload(3); };
  CHECK(trains_like_plain(make, {.world_size = 3}));
  CHECK(trains_like_plain(make, {.world_size = 4, .replicas = 2, .accumulation = Accumulation::kAllReduceLast}));
  CHECK(trains_like_plain(make, {.world_size = 4, .reshard_after_forward = 2}));
  CHECK(trains_like_plain(make, {.world_size = 2, .micro_batches = 2, .accumulation = Accumulation::kSyncAtLast}));
}

TEST_CASE("without the check nobody is told", "[group][schedule_check]") {
  const auto train = [](const ScheduleCheckOptions& options) {
    return outcome_of(2, [&](const auto& world) {
      ShardedChain chain(mesh_over(world));
      set_schedule_check(chain.root[0], options);
      chain.model->skipped = {world->rank() == 1 ? size_t{2} : size_t{1}};
      take_steps(chain, world->rank(), 60);
    });
  };
  train({.is_enabled = false}).none_says_anything();
  const ScopedEnvironment environment(Variables{{"FSDP_SCHEDULE_CHECK", "0"}});
  train(soon()).none_says_anything();
}

TEST_CASE("exceptions that all ranks raise are no disagreement", "[group][schedule_check]") {
  const auto outcome = outcome_of(2, [](const auto& world) {
    ShardedChain chain(mesh_over(world));
    set_schedule_check(chain.root[0], {.late_after = milliseconds(300), .compare_after = milliseconds(20)});
    for (int round = 0; round < 6; ++round) {
      chain.model->after_layer = [&](int layer) {
        if (layer == round % 3) throw std::logic_error("all together");
      };
      try {
        chain.step(world->rank());
      } catch (const std::logic_error&) {
        chain.root[0].reset_iter_state();
      }
      chain.model->after_layer = {};
      take_steps(chain, world->rank(), 3);
    }
  });
  outcome.none_says_anything();
}

TEST_CASE("training, evaluation and reads in turn are no disagreement", "[group][schedule_check]") {
  const auto outcome = outcome_of(3, [](const auto& world) {
    ShardedChain chain(mesh_over(world));
    set_schedule_check(chain.root[0], {.late_after = milliseconds(300), .compare_after = milliseconds(20)});
    for (int step = 0; step < 12; ++step) {
      chain.step(world->rank(), step);
      at::NoGradGuard no_grad;
      if (step % 2) fsdp::call(chain.model, torch::ones({2, 6}));
      if (step % 3) chain.model->layers[1]->weight.norm();
    }
  });
  outcome.none_says_anything();
}

TEST_CASE("the watching threads go with the models, and one rank has none", "[group][schedule_check]") {
  const int64_t before = threads_of_process();
  const auto alone = outcome_of(1, [&](const auto& world) {
    ShardedChain chain(mesh_over(world));
    take_steps(chain, 0, 2);
    if (threads_of_process() != before + 1) throw std::logic_error("a thread for one rank");
  });
  alone.none_says_anything();
  std::atomic<int64_t> with_models = 0, ready = 0;
  const auto outcome = outcome_of(2, [&](const auto& world) {
    {
      ShardedChain chain(mesh_over(world));
      take_steps(chain, world->rank(), 2);
      ++ready;
      while (ready < 2) std::this_thread::yield();
      with_models = threads_of_process();
      ++ready;
      while (ready < 4) std::this_thread::yield();
    }
    ++ready;
    while (ready < 6) std::this_thread::yield();
    if (threads_of_process() != before + 2) throw std::logic_error("a thread is left");
  });
  outcome.none_says_anything();
  CHECK(with_models == before + 4);
  CHECK(threads_of_process() == before);
}

}  // namespace fsdp::test
