#include <catch2/catch.hpp>

#include <thread>

#include "ended_ranks.hpp"

// Two models, each in a thread of its own.

namespace fsdp::test {
namespace {

using Catch::Contains;
using std::chrono::milliseconds;

/// What both threads of this rank end with; "": without an error.
std::vector<std::string> in_two_threads(const std::function<void()>& first, const std::function<void()>& second) {
  std::vector<std::string> messages(2);
  const auto run = [&](size_t thread, const std::function<void()>& body) {
    try {
      body();
    } catch (const std::exception& error) {
      messages[thread] = message_of(error);
    }
  };
  std::thread other([&] { run(1, second); });
  run(0, first);
  other.join();
  return messages;
}

/// Ranks 0 and 1 begin with other models.
void begin_late(int rank, int model) {
  if (rank != model) std::this_thread::sleep_for(milliseconds(100));
}

}  // namespace

TEST_CASE("roots over communicators of their own are no disagreement, whichever begins first", "[group][two_threads]") {
  const auto outcome = outcome_of(2, [](const auto& world) {
    const std::vector<int> ranks = {0, 1};
    // The names may be the same.
    ShardedChain one(mesh_over(world->split(ranks, "own")), 2), other(mesh_over(world->split(ranks, "own")), 4, 5);
    for (auto* chain : {&one, &other}) set_schedule_check(chain->root[0], soon());
    const auto train = [&](ShardedChain& chain, int model) {
      begin_late(world->rank(), model);
      take_steps(chain, world->rank(), 20);
    };
    for (const auto& message : in_two_threads([&] { train(one, 0); }, [&] { train(other, 1); }))
      if (!message.empty()) throw std::logic_error(message);
  });
  outcome.none_says_anything();
}

TEST_CASE("roots over hybrid meshes of their own are no disagreement, whichever begins first", "[group][two_threads]") {
  const auto outcome = outcome_of(4, [](const auto& world) {
    const auto hybrid = [&] { return init_device_mesh(world, {2, 2}, {"replicate", "shard"}); };
    const auto first = hybrid(), second = hybrid();
    ShardedChain one(first, 2), other(second, 4, 5);
    for (auto* chain : {&one, &other}) set_schedule_check(chain->root[0], soon());
    const auto train = [&](ShardedChain& chain, int model) {
      begin_late(world->rank() % 2, model);
      take_steps(chain, world->rank(), 20);
    };
    for (const auto& message : in_two_threads([&] { train(one, 0); }, [&] { train(other, 1); }))
      if (!message.empty()) throw std::logic_error(message);
  });
  outcome.none_says_anything();
}

TEST_CASE("two threads that use one communicator at once are refused by name, on all ranks", "[group][two_threads]") {
  std::vector<std::string> messages[2];
  const auto outcome = outcome_of(2, [&](const auto& world) {
    const auto mesh = mesh_over(world);
    ShardedChain one(mesh, 2), other(mesh, 2);
    for (auto* chain : {&one, &other}) set_schedule_check(chain->root[0], soon());
    // Rank 0 waits for rank 1 in one thread while another one comes.
    const auto late = world->rank() == 1 ? milliseconds(400) : milliseconds(0);
    const auto train = [&](ShardedChain& chain, int model) {
      std::this_thread::sleep_for(late + model * milliseconds(100));
      take_steps(chain, world->rank());
    };
    messages[world->rank()] = in_two_threads([&] { train(one, 0); }, [&] { train(other, 1); });
  });
  CHECK(outcome.time < patience());
  for (const auto& of_rank : messages)
    for (const auto& message : of_rank) {
      CHECK_THAT(message, Contains("two threads of rank 0 use communicator 'world' at once: one is in all_gather of 'layer0', "
                                   "another one comes with all_gather of 'layer0'"));
      CHECK_THAT(message, Contains("give the model of each thread a mesh over a communicator of its own"));
    }
}

TEST_CASE("a call beside a model's thread on its communicator is refused by name", "[group][two_threads]") {
  std::vector<std::string> messages[2];
  const auto outcome = outcome_of(2, [&](const auto& world) {
    ShardedChain chain(mesh_over(world), 2);
    set_schedule_check(chain.root[0], soon());
    const auto whole = distribute_tensor(at::ones({4, 2}), mesh_over(world), {Shard{0}});
    if (world->rank() == 1) std::this_thread::sleep_for(milliseconds(400));
    messages[world->rank()] = in_two_threads([&] { take_steps(chain, world->rank()); },
                                             [&] {
                                               std::this_thread::sleep_for(milliseconds(100));
                                               whole.full_tensor();
                                             });
  });
  CHECK(outcome.time < patience());
  for (const auto& of_rank : messages)
    for (const auto& message : of_rank)
      CHECK_THAT(message, Contains("two threads of rank 0 use communicator 'world' at once: one is in all_gather of 'layer0', "
                                   "another one comes with all_gather of 'full_tensor"));
}

TEST_CASE("threads that take turns on one communicator are no fault", "[group][two_threads]") {
  const auto outcome = outcome_of(2, [](const auto& world) {
    const auto mesh = mesh_over(world);
    ShardedChain one(mesh, 2), other(mesh, 3);
    for (int step = 0; step < 4; ++step) {
      std::thread([&] { one.step(world->rank(), step); }).join();
      std::thread([&] { other.step(world->rank(), step); }).join();
    }
  });
  outcome.none_says_anything();
}

}  // namespace fsdp::test
