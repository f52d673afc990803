#include <catch2/catch.hpp>

#include <chrono>
#include <future>
#include <thread>

#include "dispatch/host_lock.hpp"
#include "root/find_param.hpp"
#include "root/group_port.hpp"
#include "support/models.hpp"

// A root's lock and the host language's (Python's), which threads may ask for in either order.

namespace fsdp::test {
namespace {

/// As Python's is: of one thread at a time, and a thread knows whether it is its own.
std::timed_mutex host;
thread_local bool holds_host = false;

const HostLock kHostLock{
    .release =
        [] {
          if (!std::exchange(holds_host, false)) return static_cast<void*>(nullptr);
          host.unlock();
          return static_cast<void*>(&host);
        },
    .acquire =
        [](void*) {
          host.lock();
          holds_host = true;
        },
    .ensure =
        [] {
          if (holds_host) return static_cast<void*>(nullptr);
          host.lock();
          holds_host = true;
          return static_cast<void*>(&host);
        },
    .let_go =
        [](void* taken) {
          if (taken == nullptr) return;
          holds_host = false;
          host.unlock();
        },
};

TEST_CASE("an operator that writes a parameter under the host lock does not keep that from who holds the root's lock",
          "[group][root_mutex]") {
  set_host_lock(&kHostLock);
  CHECK(on_ranks(1, [](Rank& rank) {
    ShardedChain chain(rank.mesh(), 1);
    auto& weight = chain.model->layers[0]->weight;
    const auto root = GroupPort::of(*find_param(weight)->group).root();
    const auto scope = forward_scope(chain.root[0]);
    at::NoGradGuard no_grad;
    weight.sum();  // from here on the operator itself waits for nothing
    std::promise<void> holds_root, holds_both;
    std::thread shower([&] {
      std::lock_guard lock(root->mutex());
      holds_root.set_value();
      holds_both.get_future().wait();
      const bool got_it = host.try_lock_for(std::chrono::minutes(2));
      rank.check(got_it, "the host lock, under the root's");
      if (got_it) host.unlock();
    });
    holds_root.get_future().wait();
    kHostLock.acquire(nullptr);
    holds_both.set_value();
    weight.fill_(3);
    rank.check(holds_host, "it has the host lock again");
    kHostLock.release();
    shower.join();
    rank.check_close(weight, torch::full({6, 6}, 3.0), "written");
  }, {.timeout = std::chrono::minutes(5)}));
  set_host_lock(nullptr);
}

}  // namespace
}  // namespace fsdp::test
