#include <catch2/catch.hpp>

#include <filesystem>
#include <sstream>
#include <thread>

#include "ended_ranks.hpp"
#include "../checkpoint/temporary_folder.hpp"

// One rank alone makes a call in which all have to take part.

namespace fsdp::test {
namespace {

using Catch::Contains;
using std::chrono::milliseconds;

struct Alone {
  const char* call;
  std::function<void(ShardedChain&, const std::shared_ptr<Communicator>&)> make;
  std::string names;  ///< in what the ranks are told
};

std::vector<Alone> calls() {
  return {
      {"full_tensor", [](ShardedChain& chain, auto&) { full_tensor(chain.model->layers[0]->parameters()[0]); },
       "all_gather of 'full_tensor of layer0.weight'"},
      {"torch::save",
       [](ShardedChain& chain, auto&) {
         std::stringstream file;
         torch::save(chain.model, file);
       },
       "all_gather of 'torch::save'"},
      {"clip_grad_norm_",
       [](ShardedChain& chain, auto&) {
         chain.loss(0, 0).backward();  // as all ranks do
         clip_grad_norm_(chain.model->parameters(), 1);
       },
       "all_reduce of 'clip_grad_norm_'"},
      {"state_dict", [](ShardedChain& chain, auto&) { state_dict(chain.model); }, "layer0.weight"},
      {"an operator",
       [](ShardedChain& chain, auto&) {
         at::NoGradGuard no_grad;
         chain.model->layers[1]->parameters()[0].sort(0);
       },
       "layer1.weight"},
      {"save_checkpoint",
       [](ShardedChain& chain, const auto& world) {
         const TemporaryFolder folder;
         save_checkpoint(folder / "checkpoint", {.model = chain.model}, {.world = world});
       },
       "all_gather of 'save_checkpoint'"},
  };
}

}  // namespace

TEST_CASE("a call of one rank alone, beside another rank's step, ends all of them by its name", "[group][alone]") {
  for (const auto& alone : calls()) {
    CAPTURE(alone.call);
    const auto outcome = outcome_of(2, [&](const auto& world) {
      ShardedChain chain(mesh_over(world));
      set_schedule_check(chain.root[0], soon());
      take_steps(chain, world->rank(), 2);
      if (world->rank() == 0) alone.make(chain, world);
      take_steps(chain, world->rank());
    });
    outcome.all_say({"the ranks disagree about collective", alone.names, "which belongs to no group of the model", "rank 1: "});
  }
}

TEST_CASE("a rank that does not come to another one's call is named in the log and in the error", "[group][alone]") {
  for (const auto& alone : calls()) {
    if (alone.call == std::string("clip_grad_norm_")) continue;  // needs a step of all ranks
    CAPTURE(alone.call);
    std::atomic<bool> is_over = false;
    const auto timeout = on_this_machine(milliseconds(1200));
    const auto outcome = outcome_of(
        2,
        [&](const auto& world) {
          ShardedChain chain(mesh_over(world));
          set_schedule_check(chain.root[0], {.late_after = timeout / 3, .compare_after = milliseconds(20)});
          chain.step(world->rank());
          while (world->rank() == 1 && !is_over) std::this_thread::sleep_for(milliseconds(5));
          struct Over {
            std::atomic<bool>& flag;
            ~Over() { flag = true; }
          } over{is_over};
          if (world->rank() == 0) alone.make(chain, world);
        },
        timeout);
    CHECK_FALSE(outcome.is_schedule_error[0]);
    CHECK_THAT(outcome.messages[0], Contains(alone.names) && Contains("is late: rank 0 has waited") &&
                                        Contains("rank 0: waits for") && Contains("rank 1: in no collective"));
    CHECK(outcome.messages[1].empty());
  }
}

TEST_CASE("of ranks that made no model yet, those that do not come gave no sign", "[group][alone]") {
  const auto timeout = on_this_machine(milliseconds(900));
  std::atomic<bool> is_over = false;
  const auto outcome = outcome_of(
      3,
      [&](const auto& world) {
        const auto tensor = DTensor::from_local(at::ones({2, 2}), mesh_over(world), {Shard{0}});
        while (world->rank() == 2 && !is_over) std::this_thread::sleep_for(milliseconds(5));
        if (world->rank() < 2) try {
            tensor.full_tensor();
          } catch (...) {
            is_over = true;
            throw;
          }
      },
      timeout);
  for (const size_t rank : {0, 1})
    CHECK_THAT(outcome.messages[rank], Contains("ranks 0, 1: waits for all_gather of 'full_tensor") &&
                                           Contains("rank 2: gave no sign"));
}

TEST_CASE("calls that all ranks make are no disagreement, whatever their number", "[group][alone]") {
  const auto outcome = outcome_of(2, [](const auto& world) {
    ShardedChain chain(mesh_over(world)), other(mesh_over(world), 2, 5);
    for (auto* one : {&chain, &other})
      set_schedule_check(one->root[0], {.late_after = milliseconds(300), .compare_after = milliseconds(20)});
    for (int step = 0; step < 12; ++step) {
      chain.step(world->rank(), step);
      for (int call = 0; call < step % 3; ++call) full_tensor(chain.model->layers[0]->parameters()[0]);
      if (step > 4) other.step(world->rank(), step);
      if (world->rank() == step % 2) std::this_thread::sleep_for(milliseconds(20));
      for (const auto& alone : calls())
        if (step % 4 == 0 && alone.call != std::string("save_checkpoint")) alone.make(other, world);  // folders differ
    }
  });
  outcome.none_says_anything();
}

TEST_CASE("a call that only one replica makes within itself is no disagreement", "[group][alone]") {
  const auto outcome = outcome_of(4, [](const auto& world) {
    ShardedChain chain(init_device_mesh(world, {2, 2}, {"replicate", "shard"}));
    set_schedule_check(chain.root[0], {.late_after = milliseconds(300), .compare_after = milliseconds(20)});
    for (int step = 0; step < 6; ++step) {
      chain.step(world->rank(), step);
      if (world->rank() < 2) full_tensor(chain.model->layers[0]->parameters()[0]);
    }
  });
  outcome.none_says_anything();
}

}  // namespace fsdp::test
