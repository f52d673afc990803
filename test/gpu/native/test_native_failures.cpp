// What becomes of the ranks when one of them fails, over real NCCL. [alone]: each in processes of its own.
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <cstdlib>
#include <future>
#include <thread>

#include "native_world.hpp"
#include "support/patience.hpp"

namespace fsdp::test {
namespace {

using Catch::Contains;

constexpr auto kTimeout = 15s;  // connecting is to fit into it, too

at::Tensor own_piece(const Communicator& group) { return at::full({1 << 16}, group.rank() + 1.0F, on_device()); }

std::shared_ptr<Work> start_gather(Communicator& group, const std::string& subject) {
  return group.start_all_gather(at::zeros({group.size() << 16}, on_device()), own_piece(group), subject);
}

/// On a device a wait is a stream's: what the host finds out is thrown by a later one.
void wait_on_host(Work& work) {
  work.wait();
  const auto end = std::chrono::steady_clock::now() + patience();
  while (!work.is_completed() && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(10ms);
  work.wait();
}

/// Keeps this rank's process there until the other has found out; the store's file says so.
std::string sign_path() { return std::string(std::getenv("FSDP_TEST_STORE")) + ".sign"; }
void give_sign() { std::fclose(std::fopen(sign_path().c_str(), "w")); }
bool await_sign() {
  const auto end = std::chrono::steady_clock::now() + patience();
  while (std::chrono::steady_clock::now() < end) {
    if (std::FILE* sign = std::fopen(sign_path().c_str(), "r")) {
      std::fclose(sign);
      return true;
    }
    std::this_thread::sleep_for(20ms);
  }
  return false;
}

}  // namespace

TEST_CASE("a collective that one rank leaves out times out on the others", "[gpu][failures][alone]") {
  const auto group = process_world(kTimeout);
  if (!has_other_ranks(*group)) return;
  wait_on_host(*start_gather(*group, "first"));
  if (group->rank() > 0) {
    CHECK(await_sign());
    return;
  }
  const auto begin = std::chrono::steady_clock::now();
  const auto error = comm_error_of([&] { wait_on_host(*start_gather(*group, "second")); });
  CHECK_THAT(error, Contains("all_gather of 'second'") && Contains("rank 0 of "));
  CHECK(std::chrono::steady_clock::now() - begin < kTimeout + patience());
  const auto later = comm_error_of([&] { start_gather(*group, "third")->wait(); });
  CHECK_THAT(later, Contains("'third'"));
  give_sign();
}

TEST_CASE("a rank that never comes is named by those that did", "[gpu][failures][alone]") {
  const auto group = process_world(kTimeout);
  if (!has_other_ranks(*group)) return;
  if (group->rank() > 0) {
    CHECK(await_sign());
    return;
  }
  const auto error = comm_error_of([&] { wait_on_host(*start_gather(*group, "never")); });
  CHECK_THAT(error, Contains("all_gather of 'never'"));
  if (is_on_gpu()) CHECK_THAT(error, Contains("no sign of rank(s) 1"));
  give_sign();
}

TEST_CASE("an abort from another thread ends a wait, and the other ranks' too", "[gpu][failures][alone]") {
  const auto group = process_world(60s);
  if (!has_other_ranks(*group)) return;
  wait_on_host(*start_gather(*group, "first"));
  const auto begin = std::chrono::steady_clock::now();
  // Rank 0 waits for what no other rank starts.
  if (group->rank() > 0) {
    std::string error;
    const auto end = begin + patience();
    while (error.empty() && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(50ms);
      error = comm_error_of([&] {
        auto sum = at::ones({1}, on_device());
        if (await_sign()) group->start_all_reduce(sum, ReduceOp::kSum, "other")->wait();
      });
    }
    CHECK_THAT(error, Contains("all_reduce of 'other'"));
    return;
  }
  auto aborting = std::async(std::launch::async, [&] {
    std::this_thread::sleep_for(300ms);
    group->abort("the user gave up");
    give_sign();
  });
  const auto error = comm_error_of([&] { wait_on_host(*start_gather(*group, "second")); });
  aborting.get();
  CHECK_THAT(error, Contains("all_gather of 'second'") && Contains("the user gave up"));
  CHECK(std::chrono::steady_clock::now() - begin < patience());
}

TEST_CASE("a rank that dies ends the group for the others", "[gpu][failures][alone][dies]") {
  const auto group = process_world(kTimeout);
  if (!has_other_ranks(*group)) return;
  wait_on_host(*start_gather(*group, "first"));
  if (group->rank() > 0) std::_Exit(0);
  const auto begin = std::chrono::steady_clock::now();
  const auto error = comm_error_of([&] {
    for (int turn = 0; turn < 4; ++turn) wait_on_host(*start_gather(*group, "second"));
  });
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin);
  CHECK_THAT(error, Contains("all_gather of 'second'"));
  tell_figure("a rank dies: the other knows after", fmt::format("\"ms\": {}", took.count()));
}

TEST_CASE("a group that was aborted leaves the device and new groups usable", "[gpu][failures][alone]") {
  const auto world = process_world(60s);
  const auto broken = group_of_all();
  wait_on_host(*start_gather(*broken, "first"));
  broken->abort("on purpose");
  CHECK_THAT(comm_error_of([&] { wait_on_host(*start_gather(*broken, "second")); }), Contains("on purpose"));
  synchronize_device();
  const auto group = group_of_all();
  auto whole = at::zeros({group->size() << 16}, on_device());
  group->start_all_gather(whole, own_piece(*group), "third")->wait();
  for (int rank = 0; rank < group->size(); ++rank) CHECK(whole[rank << 16].item<float>() == rank + 1.0F);
}

}  // namespace fsdp::test
