// What ranks over gloo are told when something goes wrong.
#include <catch2/catch.hpp>

#include <future>
#include <thread>

#include "fsdp/error.hpp"
#include "rank_results.hpp"

namespace fsdp::test {

using Catch::Contains;
using Clock = std::chrono::steady_clock;

namespace {

/// By which a rank that lives on waits until another one has failed.
class OneFailure {
 public:
  /// Tells, if a collective of `body` fails, and passes the error on.
  void tell_of(const std::function<void()>& body) {
    try {
      body();
    } catch (const CommError&) {
      told_.set_value();
      throw;
    }
  }
  void await(std::chrono::milliseconds timeout) { is_told_.wait_for(timeout); }

 private:
  std::promise<void> told_;
  std::future<void> is_told_ = told_.get_future();
};

const std::vector<std::function<std::shared_ptr<Work>(Communicator&)>> kStarts = {
    [](Communicator& world) {
      return world.start_all_gather(at::zeros({8}), at::ones({4}), "c");
    },
    [](Communicator& world) {
      return world.start_reduce_scatter(at::zeros({4}), at::ones({8}), ReduceOp::kSum, "c");
    },
    [](Communicator& world) {
      return world.start_all_reduce(at::ones({8}), ReduceOp::kSum, "c");
    },
    [](Communicator& world) {
      return world.start_broadcast(at::ones({8}), 1, "c");
    },
};

}  // namespace

TEST_CASE("a peer that leaves ends the wait of the others in an error that names it all",
          "[comm][gloo]") {
  const auto begin = Clock::now();
  const auto errors = errors_on_gloo(
      2,
      [](Communicator& world) {
        all_reduce(world, at::ones({1}));
        if (world.rank() == 1) return;  // the sockets close when the world goes
        all_gather(world, at::zeros({8}), at::ones({4}), "blocks.3");
      },
      beyond_patience());
  CHECK(Clock::now() - begin < patience());
  CHECK_THAT(
      errors[0],
      Contains("all_gather of 'blocks.3' (32 bytes) in group 'world' on rank 0 of 2 failed: "));
  CHECK(errors[1].empty());
}

TEST_CASE("what it means that a peer has gone comes before the transport's own text", "[comm][gloo]") {
  for (const auto& start : kStarts) {
    const auto errors = errors_on_gloo(
        2,
        [&](Communicator& world) {
          all_reduce(world, at::ones({1}));
          if (world.rank() == 0) start(world)->wait();
        },
        beyond_patience());
    // A small broadcast of the one that is there may be sent before the other one goes.
    if (errors[0].empty()) continue;
    CHECK_THAT(errors[0], Contains("the connection has ended: the other rank's process has exited, or has failed; its own log says "
                                   "why (") &&
                              !Contains("typically"));
  }
}

TEST_CASE("a peer that does not come ends in an error after the timeout", "[comm][gloo]") {
  const auto begin = Clock::now();
  const auto timeout = on_this_machine(std::chrono::seconds(1));
  OneFailure failure;
  const auto errors = errors_on_gloo(
      2,
      [&](Communicator& world) {
        if (world.rank() == 1) return failure.await(patience());
        failure.tell_of(
            [&] { reduce_scatter(world, at::zeros({4}), at::ones({8}), ReduceOp::kSum, "blocks.3"); });
      },
      timeout);
  CHECK(Clock::now() - begin < patience());
  CHECK_THAT(errors[0], Contains("reduce_scatter of 'blocks.3' (32 bytes)") &&
                            Contains("failed: from rank 1: Timed out waiting " + std::to_string(timeout.count()) + "ms"));
}

TEST_CASE("a failed group fails at once from then on, with the first reason", "[comm][gloo]") {
  std::string later;
  std::promise<void> started;
  auto has_started = started.get_future();
  errors_on_gloo(
      2,
      [&](Communicator& world) {
        // A peer that leaves earlier may fail the start itself.
        if (world.rank() == 1) return (void)has_started.wait_for(patience());
        const auto work = world.start_all_gather(at::zeros({8}), at::ones({4}), "first");
        started.set_value();
        for (int i = 0; i < 2; ++i) {
          try {
            work->wait();
          } catch (const CommError&) {
          }
        }
        try {
          all_reduce(world, at::ones({1}), ReduceOp::kSum, "later");
        } catch (const CommError& error) {
          later = error.what();
        }
      },
      beyond_patience());
  CHECK_THAT(later, Contains("all_reduce of 'later'"));
}

TEST_CASE("a rank whose collective failed is not waited for, though it lives", "[comm][gloo]") {
  const auto begin = Clock::now();
  OneFailure failure;
  const auto errors = errors_on_gloo(
      3,
      [&](Communicator& world) {
        all_reduce(world, at::ones({1}));
        if (world.rank() == 0) return;
        if (world.rank() == 2)
          return failure.tell_of([&] { broadcast(world, at::ones({8}), 1, "of rank 1 alone"); });
        try {
          all_gather(world, at::zeros({12}), at::ones({4}), "of all");  // waits for rank 0 first
        } catch (const CommError&) {
          failure.await(beyond_patience());
          throw;
        }
      },
      beyond_patience());
  CHECK(Clock::now() - begin < patience());
  CHECK_THAT(errors[2], Contains("broadcast of 'of rank 1 alone'"));
  CHECK_THAT(errors[1], Contains("all_gather of 'of all'"));
  CHECK(errors[0].empty());
}

TEST_CASE("a connection that ends in the middle of a message ends the wait for it", "[comm][gloo]") {
  constexpr int64_t kNumel = 32 << 20;
  const auto begin = Clock::now();
  const auto errors = errors_on_gloo(
      2,
      [&](Communicator& world) {
        auto all = at::zeros({2 * kNumel});
        const auto work = world.start_all_gather(all, at::ones({kNumel}), "of both");
        if (world.rank() == 0) return work->wait();
        const volatile float* first = all.const_data_ptr<float>();
        while (*first == 0 && !work->is_completed()) std::this_thread::yield();
        throw UsageError("an error of the program");
      },
      beyond_patience());
  CHECK(Clock::now() - begin < patience());
  CHECK(errors[1] == "an error of the program");
  // Where rank 1 came late, everything has arrived.
  if (!errors[0].empty()) CHECK_THAT(errors[0], Contains("all_gather of 'of both'") && Contains("from rank 1"));
}

TEST_CASE("a rank that leaves in an error does not wait for what it has started", "[comm][gloo]") {
  for (const auto& start : kStarts) {
    const auto begin = Clock::now();
    const auto errors = errors_on_gloo(
        2,
        [&](Communicator& world) {
          all_reduce(world, at::ones({1}));
          if (world.rank() == 1) return all_gather(world, at::zeros({4}), at::ones({2}), "of both");
          const auto work = start(world);
          throw UsageError("an error of the program");
        },
        beyond_patience());
    CHECK(Clock::now() - begin < patience());
    CHECK(errors[0] == "an error of the program");
    CHECK_THAT(errors[1], Contains("all_gather of 'of both'"));
  }
}

TEST_CASE("abort ends a wait from another thread, whatever the collective", "[comm][gloo]") {
  for (const auto& start : kStarts) {
    const auto begin = Clock::now();
    OneFailure failure;
    const auto errors = errors_on_gloo(
        2,
        [&](Communicator& world) {
          if (world.rank() == 1) return failure.await(patience());
          const auto work = start(world);
          const auto other = std::async(std::launch::async, [&] {
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
            world.abort("enough");
          });
          failure.tell_of([&] { work->wait(); });
        },
        beyond_patience());
    CHECK(Clock::now() - begin < patience());
    CHECK_THAT(errors[0], Contains("in group 'world' on rank 0 of 2 failed: enough"));
  }
}

TEST_CASE("an abort fails what the other ranks wait for, though the rank lives", "[comm][gloo]") {
  const auto begin = Clock::now();
  OneFailure failure;
  const auto errors = errors_on_gloo(
      2,
      [&](Communicator& world) {
        all_reduce(world, at::ones({1}));
        if (world.rank() == 1) {
          world.abort("enough");
          return failure.await(beyond_patience());
        }
        failure.tell_of([&] { all_gather(world, at::zeros({8}), at::ones({4}), "of both"); });
      },
      beyond_patience());
  CHECK(Clock::now() - begin < patience());
  CHECK_THAT(errors[0], Contains("all_gather of 'of both'"));
}

}  // namespace fsdp::test
