// What becomes of the ranks when NCCL, or one of them, fails.
#include <catch2/catch.hpp>

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <future>
#include <stdexcept>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/nccl/nccl_communicator.hpp"
#include "fsdp/error.hpp"
#include "nccl_ranks.hpp"
#include "support/logged_lines.hpp"

namespace fsdp::test {
namespace {

using namespace std::chrono_literals;
using Catch::Contains;

class Stopwatch {
 public:
  std::chrono::milliseconds elapsed() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin_);
  }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

at::Tensor rank_numbers(const Communicator& comm, int64_t numel = 4) { return at::full({numel}, comm.rank() + 1.0F); }

/// Of a device that goes when the process begins to end, as CUDA does.
class EndingStreams final : public HostStreams {
 public:
  EndingStreams() {
    std::atexit([] {
      has_gone = true;
      std::this_thread::sleep_for(50ms);  // what comes behind this takes its time
    });
  }
  c10::Device device() const override {
    if (has_gone) throw std::runtime_error("CUDA error: driver shutting down");
    return HostStreams::device();
  }

 private:
  static inline std::atomic<bool> has_gone{false};
};

struct Run {
  int status = 0;
  std::string errors;  // what it has written there
};

/// This program again for the one hidden test `name`.
Run run_self(const std::string& name) {
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0) throw std::runtime_error("no pipe");
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(ends[1], STDERR_FILENO);
    ::execl("/proc/self/exe", "fsdp_test_comm", name.c_str(), static_cast<char*>(nullptr));
    ::_exit(127);
  }
  ::close(ends[1]);
  Run run;
  std::array<char, 4096> part{};
  for (ssize_t count; (count = ::read(ends[0], part.data(), part.size())) > 0;) run.errors.append(part.data(), count);
  ::close(ends[0]);
  ::waitpid(child, &run.status, 0);
  return run;
}

void gather_once(Communicator& comm, const std::string& subject) {
  all_gather(comm, at::zeros({comm.size() * 4}), rank_numbers(comm), subject);
}

}  // namespace

TEST_CASE("a rank that never comes is named by those that did", "[comm][nccl_failures]") {
  const NcclSubstitute nccl;
  const auto timeout = on_this_machine(300ms);
  const auto errors = errors_on_nccl(nccl, {.world_size = 3, .timeout = timeout}, [](NcclRank& rank) {
    if (rank.world->rank() != 2) gather_once(*rank.world, "blocks.3");
  });
  for (const int rank : {0, 1}) {
    CHECK_THAT(errors[rank], Contains(fmt::format("no sign of rank(s) 2 within {} ms", timeout.count())));
    CHECK_THAT(errors[rank], Contains("all_gather of 'blocks.3' (48 bytes) in group 'world' on rank " +
                                      std::to_string(rank) + " of 3 failed"));
  }
  CHECK(errors[2].empty());
  CHECK(nccl.misuses().empty());
}

TEST_CASE("a rank that cannot connect tells the others why, at once", "[comm][nccl_failures]") {
  const Stopwatch watch;
  const NcclSubstitute nccl({.init_fails_on = 1});
  const auto errors =
      errors_on_nccl(nccl, {.world_size = 3}, [](NcclRank& rank) { gather_once(*rank.world, "blocks.3"); });
  for (const std::string& error : errors) CHECK_THAT(error, Contains("unhandled system error (no network interface"));
  CHECK_THAT(errors[0], Contains("rank 1: NCCL "));
  CHECK(nccl.misuses().empty());
  CHECK(watch.elapsed() < patience());
}

TEST_CASE("a collective that one rank leaves out times out on the others", "[comm][nccl_failures]") {
  const NcclSubstitute nccl;
  std::promise<void> ended;
  const auto may_leave = ended.get_future().share();
  const auto timeout = on_this_machine(300ms);
  const auto errors = errors_on_nccl(nccl, {.timeout = timeout}, [&](NcclRank& rank) {
    gather_once(*rank.world, "first");
    if (rank.world->rank() == 1) return (void)may_leave.wait_for(patience());
    try {
      gather_once(*rank.world, "second");
    } catch (const CommError&) {
      ended.set_value();
      throw;
    }
  });
  CHECK_THAT(errors[0], Contains("all_gather of 'second' (32 bytes) in group 'world' on rank 0 of 2 failed"));
  CHECK_THAT(errors[0], Contains(fmt::format("was not done within {} ms", timeout.count())));
  CHECK(errors[1].empty());
  CHECK(nccl.misuses().empty());
}

TEST_CASE("an error that NCCL finds later reaches all ranks, and all later collectives", "[comm][nccl_failures]") {
  const Stopwatch watch;
  const NcclSubstitute nccl({.async_error = NcclSubstitute::Place{.rank = 1, .launch = 3}});
  std::vector<std::string> later(3);
  const auto errors = errors_on_nccl(nccl, {.world_size = 3}, [&](NcclRank& rank) {
    try {
      for (int i = 0; i < 4; ++i) gather_once(*rank.world, "step " + std::to_string(i));
    } catch (const CommError&) {
      try {
        all_reduce(*rank.world, at::ones({1}), ReduceOp::kSum, "later");
      } catch (const CommError& error) {
        later[rank.world->rank()] = error.what();
      }
      throw;
    }
  });
  for (int rank = 0; rank < 3; ++rank) {
    CHECK_THAT(errors[rank], Contains("all_gather of 'step 2'"));
    CHECK_THAT(errors[rank], Contains("network error (the peer has closed the connection)"));
    CHECK_THAT(later[rank], Contains("all_reduce of 'later'") && Contains("the peer has closed the connection"));
  }
  CHECK_THAT(errors[0], Contains("rank 1: NCCL "));
  CHECK(nccl.misuses().empty());
  CHECK(watch.elapsed() < patience());
}

TEST_CASE("an abort from another thread ends a wait, and the other ranks' too", "[comm][nccl_failures]") {
  const Stopwatch watch;
  const NcclSubstitute nccl;
  const auto errors = errors_on_nccl(nccl, {.world_size = 2}, [](NcclRank& rank) {
    gather_once(*rank.world, "first");
    if (rank.world->rank() == 1) std::this_thread::sleep_for(100ms);
    std::thread other([&] {
      std::this_thread::sleep_for(50ms);
      if (rank.world->rank() == 0) rank.world->abort("the user gave up");
      if (rank.world->rank() == 0) rank.world->abort("a second reason");
    });
    try {
      // Rank 1 reduces where rank 0 gathers: neither could end.
      if (rank.world->rank() == 0)
        gather_once(*rank.world, "second");
      else
        all_reduce(*rank.world, at::ones({1}), ReduceOp::kSum, "third");
    } catch (...) {
      other.join();
      throw;
    }
    other.join();
  });
  CHECK_THAT(errors[0], Contains("all_gather of 'second'") && Contains("failed: the user gave up"));
  CHECK_THAT(errors[1], Contains("all_reduce of 'third'") && Contains("failed: rank 0: the user gave up"));
  CHECK(nccl.misuses().empty());
  CHECK(watch.elapsed() < patience());
}

TEST_CASE("an abort returns at once while a call of NCCL's hangs, and ends it", "[comm][nccl_failures]") {
  const Stopwatch watch;
  const NcclSubstitute nccl({.blocks = NcclSubstitute::Place{.rank = 0, .launch = 2}});
  std::atomic<int64_t> abort_took_ms{-1};
  const auto errors = errors_on_nccl(nccl, {.world_size = 2}, [&](NcclRank& rank) {
    gather_once(*rank.world, "first");
    if (rank.world->rank() == 1) return;
    std::thread other([&] {
      std::this_thread::sleep_for(100ms);
      const Stopwatch abort_watch;
      rank.world->abort("the user gave up");
      abort_took_ms = abort_watch.elapsed().count();
    });
    try {
      gather_once(*rank.world, "second");
    } catch (...) {
      other.join();
      throw;
    }
    other.join();
  });
  CHECK_THAT(errors[0], Contains("all_gather of 'second'") && Contains("failed: the user gave up"));
  CHECK(abort_took_ms >= 0);
  CHECK(abort_took_ms < patience().count());
  CHECK(watch.elapsed() < patience());
  CHECK(nccl.misuses().empty());
}

TEST_CASE("a call of NCCL's that hangs is ended by the timeout", "[comm][nccl_failures]") {
  const NcclSubstitute nccl({.blocks = NcclSubstitute::Place{.rank = 0, .launch = 1}});
  const auto timeout = on_this_machine(300ms);
  const auto errors = errors_on_nccl(nccl, {.world_size = 2, .timeout = timeout}, [&](NcclRank& rank) {
    all_reduce(*rank.world, at::ones({1}), ReduceOp::kSum, "sum");
  });
  CHECK_THAT(errors[0], Contains("all_reduce of 'sum'") &&
                            Contains(fmt::format("was not done within {} ms", timeout.count())));
  CHECK_THAT(errors[1], Contains("all_reduce of 'sum'"));
  CHECK(nccl.misuses().empty());
}

TEST_CASE("a rank that leaves by an exception ends the group for the others", "[comm][nccl_failures]") {
  const Stopwatch watch;
  const NcclSubstitute nccl;
  const auto errors = errors_on_nccl(nccl, {.world_size = 2}, [](NcclRank& rank) {
    gather_once(*rank.world, "first");
    if (rank.world->rank() == 1) throw UsageError("a mistake of the user's");
    gather_once(*rank.world, "second");
  });
  CHECK_THAT(errors[0], Contains("failed: rank 1: this rank was ended by an exception"));
  CHECK(errors[1] == "a mistake of the user's");
  CHECK(nccl.misuses().empty());
  CHECK(watch.elapsed() < patience());
}

TEST_CASE("a group may go while work is under way: it is done first", "[comm][nccl_failures]") {
  const NcclSubstitute nccl;
  std::vector<at::Tensor> outputs(2);
  const auto errors = errors_on_nccl(nccl, {.world_size = 2}, [&](NcclRank& rank) {
    outputs[rank.world->rank()] = at::zeros({8});
    gather_once(*rank.world, "first");
    if (rank.world->rank() == 1) std::this_thread::sleep_for(100ms);
    auto work = rank.world->start_all_gather(outputs[rank.world->rank()], rank_numbers(*rank.world), "last");
    rank.world = nullptr;
    work->wait();  // it outlives the group
  });
  CHECK(errors == no_errors(2));
  const auto expected = at::tensor({1.F, 1.F, 1.F, 1.F, 2.F, 2.F, 2.F, 2.F});
  for (const at::Tensor& output : outputs) CHECK(at::equal(output, expected));
  CHECK(nccl.misuses().empty());
}

TEST_CASE("a group whose work never ends goes after the timeout", "[comm][nccl_failures]") {
  const Stopwatch watch;
  const NcclSubstitute nccl;
  const auto errors = errors_on_nccl(nccl, {.world_size = 2, .timeout = on_this_machine(300ms)}, [&](NcclRank& rank) {
    gather_once(*rank.world, "first");
    if (rank.world->rank() == 0)
      rank.world->start_all_gather(at::zeros({8}), rank_numbers(*rank.world), "never");
  });
  CHECK(errors == no_errors(2));
  CHECK(watch.elapsed() < patience());
  CHECK(nccl.misuses().empty());
}

TEST_CASE("a group that fails leaves its parent and its siblings alone", "[comm][nccl_failures]") {
  const NcclSubstitute nccl;
  std::vector<float> sums(2);
  const auto errors = errors_on_nccl(nccl, {.world_size = 2}, [&](NcclRank& rank) {
    const std::vector<int> both = {0, 1};
    const auto first = rank.world->split(both, "first");
    const auto second = rank.world->split(both, "second");
    gather_once(*first, "before");
    first->abort("only this one");
    bool has_thrown = false;
    try {
      gather_once(*first, "after");
    } catch (const CommError&) {
      has_thrown = true;
    }
    if (!has_thrown) throw std::logic_error("an aborted group gathers");
    const at::Tensor sum = at::ones({1});
    all_reduce(*second, sum);
    all_reduce(*rank.world, sum);
    sums[rank.world->rank()] = sum.item<float>();
  });
  CHECK(errors == no_errors(2));
  CHECK(sums == std::vector<float>{4, 4});
  CHECK(nccl.misuses().empty());
}

TEST_CASE("a device that is gone is an error of the next collective, and ends no process", "[comm][nccl_failures]") {
  const NcclSubstitute nccl;
  const auto has_lost_device = std::make_shared<std::atomic<bool>>(false);
  std::vector<int> are_comm_errors(2);
  const auto errors = errors_on_nccl(nccl, {.streams = {.has_lost_device = has_lost_device}}, [&](NcclRank& rank) {
    try {
      gather_once(*rank.world, "first");
      gather_once(*rank.world, "second");  // the other has come through the first
      *has_lost_device = true;
      std::this_thread::sleep_for(50ms);  // several looks of the watchdog
      gather_once(*rank.world, "third");
    } catch (const CommError&) {
      are_comm_errors[rank.world->rank()] = 1;
      throw;
    }
  });
  for (const std::string& error : errors) CHECK_THAT(error, Contains("all_gather of '") && Contains("no such device any more"));
  CHECK(are_comm_errors == std::vector<int>{1, 1});
}

TEST_CASE("a group that ends before a graph of its collectives says so, and does not wait for long", "[comm][nccl_failures]") {
  const LoggedLines logged;
  const Stopwatch watch;
  std::vector<std::shared_ptr<HostStreams>> streams(2);
  const NcclSubstitute nccl;
  const auto errors = errors_on_nccl(nccl, {}, [&](NcclRank& rank) {
    streams[rank.world->rank()] = rank.streams;
    rank.streams->set_capturing(true);
    gather_once(*rank.world, "captured");
    rank.streams->set_capturing(false);
  });
  CHECK(errors == no_errors(2));
  CHECK(watch.elapsed() < patience());
  CHECK(logged.count("a CUDA graph that has captured gathers of it is still there") == 2);
  CHECK(nccl.misuses().size() == 2);  // both ranks' communicators, until the graphs go
  for (const auto& of_rank : streams) of_rank->drop_graphs();
  while (!nccl.misuses().empty() && watch.elapsed() < 2 * patience()) std::this_thread::sleep_for(1ms);
  CHECK(nccl.misuses().empty());
}

TEST_CASE("the process of a world that nobody destroys", "[.][nccl_exit]") {
  static auto* nccl = new NcclSubstitute;
  static auto* world = new std::shared_ptr<Communicator>;
  *world = make_nccl_communicator({.store = c10::make_intrusive<c10d::HashStore>(),
                                   .watch_interval = 1ms,
                                   .api = &nccl->api(),
                                   .streams = std::make_shared<EndingStreams>()});
  all_reduce(**world, at::ones({1}));
  (*world)->start_all_reduce(at::ones({1}), ReduceOp::kSum, "not waited for");
}

TEST_CASE("a process ends quietly with a world that nobody has destroyed", "[comm][nccl_failures]") {
  const Run run = run_self("the process of a world that nobody destroys");
  CHECK(run.status == 0);
  CHECK(run.errors.empty());
}

TEST_CASE("the substitute notices launches that differ, in order or in size", "[comm][nccl_failures]") {
  for (const bool differs_in_size : {false, true}) {
    const NcclSubstitute nccl;
    const auto errors = errors_on_nccl(nccl, {.world_size = 2}, [&](NcclRank& rank) {
      const bool is_other = rank.world->rank() == 1;
      if (differs_in_size)
        all_reduce(*rank.world, at::ones({is_other ? 2 : 3}));
      else if (is_other)
        broadcast(*rank.world, at::ones({4}), 0);
      else
        gather_once(*rank.world, "gather");
    });
    for (const std::string& error : errors) CHECK_FALSE(error.empty());
    REQUIRE(nccl.misuses().size() == 1);
    CHECK_THAT(nccl.misuses()[0], Contains("launch 1 is "));
  }
}

TEST_CASE("the substitute notices leaks, uses after the end, and operators that are gone", "[comm][nccl_failures]") {
  const NcclSubstitute nccl;
  const NcclApi& api = nccl.api();
  ncclUniqueId id;
  REQUIRE(api.get_unique_id(&id) == ncclSuccess);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t comm = nullptr;
  REQUIRE(api.comm_init_rank_config(&comm, 1, id, 0, &config) == ncclInProgress);
  float value = 1;
  CHECK(api.all_reduce(&value, &value, 1, ncclFloat32, ncclSum, comm, nullptr) == ncclInvalidUsage);  // not connected
  ncclResult_t state = ncclInProgress;
  REQUIRE(api.comm_get_async_error(comm, &state) == ncclSuccess);
  REQUIRE(state == ncclSuccess);
  ncclRedOp_t op;
  REQUIRE(api.red_op_create_pre_mul_sum(&op, &value, ncclFloat32, ncclScalarHostImmediate, comm) == ncclSuccess);
  CHECK(api.all_reduce(&value, &value, 1, ncclFloat64, op, comm, nullptr) == ncclInvalidUsage);
  REQUIRE(api.red_op_destroy(op, comm) == ncclSuccess);
  CHECK(api.all_reduce(&value, &value, 1, ncclFloat32, op, comm, nullptr) == ncclInvalidUsage);
  CHECK(api.comm_destroy(comm) == ncclInvalidUsage);  // not finalized
  CHECK(nccl.misuses().size() == 5);                  // four uses and the leak
  CHECK(api.comm_abort(comm) == ncclSuccess);
  CHECK(api.comm_abort(comm) == ncclInvalidUsage);
  CHECK(api.group_end() == ncclInvalidUsage);
  CHECK(nccl.misuses().size() == 6);
}

}  // namespace fsdp::test
