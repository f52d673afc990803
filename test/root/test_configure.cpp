#include <catch2/catch.hpp>

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "dispatch/host_lock.hpp"
#include "module/handles.hpp"
#include "module/state/module_state.hpp"
#include "root/root_context.hpp"
#include "support/models.hpp"

// What users set of a group or a root is written under the root's lock, as what runs a step reads it there.

namespace fsdp::test {
namespace {

/// Whether the thread that calls a control has to wait for the root's lock, or comes back without.
class Wait {
 public:
  void begin() { set(State::kUnknown); }
  void note(bool waits) { set(waits ? State::kWaits : State::kCameBack); }
  bool is_for_lock() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return state_ != State::kUnknown; });
    return state_ == State::kWaits;
  }

 private:
  enum class State { kUnknown, kWaits, kCameBack };
  void set(State state) {
    {
      std::lock_guard lock(mutex_);
      if (state == State::kUnknown || state_ == State::kUnknown) state_ = state;
    }
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kUnknown;
};

Wait wait;
thread_local bool calls_control = false;

/// Whoever waits for a root's lock lets go of this one first.
const HostLock kNotedLock{
    .release = []() -> void* {
      if (calls_control) wait.note(true);
      return nullptr;
    },
    .acquire = [](void*) {},
    .ensure = []() -> void* { return nullptr; },
    .let_go = [](void*) {},
};

struct Control {
  const char* name;
  std::function<void(FSDPModule&)> call;
};

const std::vector<Control>& controls() {
  static const std::vector<Control> all = {
      {"set_requires_gradient_sync", [](FSDPModule& m) { m.set_requires_gradient_sync(false); }},
      {"set_requires_all_reduce", [](FSDPModule& m) { m.set_requires_all_reduce(false); }},
      {"set_is_last_backward", [](FSDPModule& m) { m.set_is_last_backward(false); }},
      {"set_reshard_after_forward", [](FSDPModule& m) { m.set_reshard_after_forward(false); }},
      {"set_reshard_after_backward", [](FSDPModule& m) { m.set_reshard_after_backward(false); }},
      {"set_modules_to_forward_prefetch", [](FSDPModule& m) { m.set_modules_to_forward_prefetch({m}); }},
      {"set_modules_to_backward_prefetch", [](FSDPModule& m) { m.set_modules_to_backward_prefetch({m}); }},
      {"set_prefetch_distance", [](FSDPModule& m) { m.set_prefetch_distance(2); }},
      {"set_reduce_scatter_start", [](FSDPModule& m) { m.set_reduce_scatter_start(ReduceScatterStart::kFirstAfterAllGather); }},
      {"set_unsharded_byte_budget", [](FSDPModule& m) { m.set_unsharded_byte_budget(1 << 20); }},
      {"set_gradient_divide_factor", [](FSDPModule& m) { m.set_gradient_divide_factor(2); }},
      {"set_force_sum_reduction_for_comms", [](FSDPModule& m) { m.set_force_sum_reduction_for_comms(true); }},
      {"set_unshard_in_backward", [](FSDPModule& m) { m.set_unshard_in_backward(false); }},
      {"set_reduce_scatter_unused_params", [](FSDPModule& m) { m.set_reduce_scatter_unused_params(true); }},
      {"set_custom_all_gather", [](FSDPModule& m) { m.set_custom_all_gather(nullptr); }},
      {"set_custom_reduce_scatter", [](FSDPModule& m) { m.set_custom_reduce_scatter(nullptr); }},
      {"set_all_reduce_hook", [](FSDPModule& m) { m.set_all_reduce_hook(nullptr); }},
      {"set_allocate_memory_from_process_group_for_comm",
       [](FSDPModule& m) { m.set_allocate_memory_from_process_group_for_comm(false); }},
      {"set_reduce_scatter_max_input_buffers", [](FSDPModule& m) { m.set_reduce_scatter_max_input_buffers(2); }},
      {"set_separate_reduce_scatter_group", [](FSDPModule& m) { m.set_separate_reduce_scatter_group(false); }},
      {"set_keep_unsharded_storage", [](FSDPModule& m) { m.set_keep_unsharded_storage(true); }},
  };
  return all;
}

TEST_CASE("every control waits for who has the root's lock", "[root][configure]") {
  set_host_lock(&kNotedLock);
  CHECK(on_ranks(1, [](Rank& rank) {
    ShardedChain chain(rank.mesh(), 2);
    chain.step(rank.index());
    auto& root = chain.root[0];
    for (const auto& [name, call] : controls()) {
      wait.begin();
      std::thread caller;
      {
        const std::lock_guard lock(handles::state(root).context()->mutex());
        caller = std::thread([&] {
          calls_control = true;
          call(root);
          wait.note(false);
        });
        rank.check(wait.is_for_lock(), std::string(name) + " waits for the root's lock");
      }
      caller.join();
    }
  }));
  set_host_lock(nullptr);
}

}  // namespace
}  // namespace fsdp::test
