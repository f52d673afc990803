#pragma once

#include <catch2/catch.hpp>

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "support/models.hpp"

// Ranks that are threads, each of which ends with an error or without.
namespace fsdp::test {

/// Soon enough for a test, and late enough for this machine.
inline ScheduleCheckOptions soon() {
  return {.late_after = on_this_machine(std::chrono::milliseconds(5000)), .compare_after = std::chrono::milliseconds(50)};
}

/// How each rank ended.
struct Outcome {
  explicit Outcome(int ranks) : messages(static_cast<size_t>(ranks)), is_schedule_error(static_cast<size_t>(ranks)), differences(messages.size()) {}
  std::vector<std::string> messages;
  std::vector<char> is_schedule_error;
  std::vector<ScheduleDifference> differences;
  std::chrono::milliseconds time{0};

  void all_say(const std::vector<std::string>& parts) const {
    for (size_t rank = 0; rank < messages.size(); ++rank) {
      CAPTURE(rank);
      CHECK(is_schedule_error[rank]);
      CHECK(messages[rank] == messages[0]);
    }
    for (const auto& part : parts) CHECK_THAT(messages[0], Catch::Contains(part));
    CHECK(time < patience());
  }
  void none_says_anything() const {
    for (const auto& message : messages) CHECK(message.empty());
  }
};

/// Runs the body on ranks that are threads; an exception ends the body, not the rank.
inline Outcome outcome_of(int ranks, const std::function<void(const std::shared_ptr<Communicator>&)>& body,
                   std::chrono::milliseconds timeout = beyond_patience()) {
  Outcome outcome(ranks);
  const auto begin = std::chrono::steady_clock::now();
  std::atomic<int> running = ranks;
  run_ranks(
      ranks,
      [&](const std::shared_ptr<Communicator>& world) {
        const auto rank = static_cast<size_t>(world->rank());
        try {
          body(world);
        } catch (const std::exception& error) {
          outcome.messages[rank] = message_of(error);
          const auto* disagreement = dynamic_cast<const ScheduleError*>(&error);
          outcome.is_schedule_error[rank] = disagreement != nullptr;
          if (disagreement != nullptr) outcome.differences[rank] = disagreement->difference();
        }
        // In a process of its own nobody would hear that the others' rank has ended.
        --running;
        while (running > 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      },
      {.timeout = timeout});
  outcome.time = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin);
  return outcome;
}

/// Steps of a chain, all layers of one size, until somebody objects.
inline void take_steps(ShardedChain& chain, int rank, int count = 1000) {
  for (int step = 0; step < count; ++step) {
    chain.step(rank, step);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

inline DeviceMesh mesh_over(const std::shared_ptr<Communicator>& world) {
  return init_device_mesh(world, {world->size()}, {"shard"});
}

}  // namespace fsdp::test
