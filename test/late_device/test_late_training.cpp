// The whole runtime on devices whose streams are threads: every step is queued before the first is read.
#include <catch2/catch.hpp>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "late_pinned.hpp"
#include "late_training.hpp"
#include "support/sample.hpp"

namespace fsdp::test {
namespace {

using namespace std::chrono_literals;
const std::vector<std::string> kNothing = {};

/// Delays that make streams meet in another order than they were queued in.
HostStreams::Options delays(uint64_t seed) {
  return {.seed = seed, .max_delay = 200us, .has_own_paces = seed % 2 == 0};
}

void check_training(LateTraining training, const std::vector<int>& worlds = {2, 3}) {
  Sample sample(1);
  for (const int world_size : worlds)
    for (const uint64_t seed : {1, 2, 3}) {
      if (!sample.takes_next()) continue;
      training.width = seed == 2 ? kWide : kNarrow;
      INFO(world_size << " ranks, seed " << seed);
      CHECK(wrong_on_late(training, {.world_size = world_size, .streams = delays(seed)}) == kNothing);
    }
}

}  // namespace

TEST_CASE("a chain of sharded layers trains on streams as the plain one does, and the host waits for nothing",
          "[late][training]") {
  check_training({});
}

TEST_CASE("a host that waits in a step is told", "[late][training]") {
  const auto wrong = wrong_on_late({.after_step = [](ShardedChain& chain) { chain.model->head->bias.sum().item(); }}, {});
  REQUIRE(wrong.size() == 2);
  CHECK_THAT(wrong[0], Catch::Contains("the host has waited for its device 3 times"));
}

TEST_CASE("without any wait between streams it does not", "[late][training]") {
  for (const uint64_t seed : {1, 2, 3}) {
    auto streams = delays(seed);
    streams.forgets_waits = true;
    INFO("seed " << seed);
    CHECK(!wrong_on_late({}, {.streams = streams}).empty());
  }
}

TEST_CASE("without one wait it does not, whichever that is", "[late][training]") {
  LateTraining training{.steps = 4};
  std::vector<int> waits;  // of rank 0, after each step
  training.after_step = [&](ShardedChain& chain) {
    if (chain.root[0].mesh().device() == late(0)) waits.push_back(LateDevices::streams(0)->waits());
  };
  REQUIRE(wrong_on_late(training, {}) == kNothing);
  training.after_step = {};
  // Once the first steps have shown the order: launches behind what was computed, uses behind collectives.
  std::vector<int> unnoticed;
  Sample sample(1);
  for (int wait = waits[1] + 1; wait <= waits[2]; ++wait) {
    if (!sample.takes_next()) continue;
    bool is_noticed = false;
    for (uint64_t seed = 1; seed <= 8 && !is_noticed; ++seed) {
      HostStreams::Options streams{.seed = seed, .max_delay = 300us, .has_own_paces = true};
      streams.forgets_wait = wait;
      is_noticed = !wrong_on_late(training, {.streams = streams}).empty();
    }
    if (!is_noticed) unnoticed.push_back(wait);
  }
  CAPTURE(waits, unnoticed);
  // The first layer's weight is gathered in backward, where nothing reads it. A gather may be behind all it needs by
  // way of the gather before it. What a reduction has sent is taken back long after it has been sent, as a rule. And luck
  // may have it that a stream was never late.
  CHECK(waits[2] - waits[1] >= 20);
  CHECK(unnoticed.size() <= static_cast<size_t>(waits[2] - waits[1]) / 4);
}

TEST_CASE("groups gathered further ahead, and reductions side by side on a communicator of their own, are as good",
          "[late][training]") {
  check_training({.layers = 6, .control = [](ShardedChain& chain) {
                    chain.root[0].set_prefetch_distance(2);
                    chain.root[0].set_reduce_scatter_max_input_buffers(2);
                    chain.root[0].set_separate_reduce_scatter_group();
                  }});
}

TEST_CASE("so are parameters that stay after forward, and that stay from step to step", "[late][training]") {
  check_training({.options = {.reshard_after_forward = false}});
  check_training({.control = [](ShardedChain& chain) { chain.root[0].set_keep_unsharded_storage(true); }}, {2});
}

TEST_CASE("so is the flat layout", "[late][training]") { check_training({.options = {.layout = ParamLayout::kFlat}}); }

TEST_CASE("so is a gradient that is added up over micro-batches, before the reduction or behind it",
          "[late][training]") {
  LateTraining training{.steps = 4, .micro_batches = 3};
  check_training(training, {2});
  training.before_backward = [](ShardedChain& chain, int micro_batch) {
    chain.root[0].set_requires_gradient_sync(micro_batch == 2);
  };
  check_training(training);
  training.before_backward = [](ShardedChain& chain, int micro_batch) {
    chain.root[0].set_is_last_backward(micro_batch == 2);
  };
  check_training(training, {2});
}

TEST_CASE("so is Adam, whose state is made on the device", "[late][training]") {
  check_training({.uses_adam = true});
}

TEST_CASE("in low precision it trains nearly as the plain one does", "[late][training]") {
  check_training({.relative = 0.05,
                  .options = {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}}});
}

TEST_CASE("gathers that wait for the optimizer's event alone read what it has written", "[late][training]") {
  check_training({.after_step = [](ShardedChain& chain) {
    c10::Event event(kLate);
    event.record(c10::impl::VirtualGuardImpl(kLate).getStream(late(chain.root[0].mesh().device().index())));
    chain.root[0].set_post_optim_event(std::move(event));
  }});
}

TEST_CASE("parameters gathered into memory that all ranks have registered are as good", "[late][training]") {
  check_training({.control = [](ShardedChain& chain) {
    for (auto& layer : chain.layers) layer.set_symm_mem_for_comm();
    chain.root[0].set_symm_mem_for_comm();
  }});
}

TEST_CASE("so are replicas, whose sums are all-reduced behind each backward or behind the last", "[late][training]") {
  LateTraining training{.mesh = {2, 2}};
  check_training(training, {4});
  training.micro_batches = 2;
  training.steps = 3;
  training.before_backward = [](ShardedChain& chain, int micro_batch) {
    chain.root[0].set_requires_all_reduce(micro_batch == 1);
  };
  check_training(training, {4});
}

TEST_CASE("so is a model whose compute stream is not the default one", "[late][training]") {
  check_training({.runs_on_side_stream = true});
}

TEST_CASE("so are shards in the host's memory, with copies that the step does not wait for", "[late][training]") {
  for (const bool is_pinned : {true, false}) {
    INFO("pinned: " << is_pinned);
    check_training({.options = {.offload_policy = CPUOffloadPolicy{.pin_memory = is_pinned}}, .waits_in_steps = true});
  }
}

TEST_CASE("nobody asks the driver whether an offloaded model's memory is pinned", "[late][training]") {
  const auto before = questions_whether_pinned();
  check_training({.options = {.offload_policy = CPUOffloadPolicy{.pin_memory = true}}, .waits_in_steps = true});
  CHECK(questions_whether_pinned() == before);
}

}  // namespace fsdp::test
