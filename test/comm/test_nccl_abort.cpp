#include <catch2/catch.hpp>

#include <atomic>
#include <future>
#include <memory>

#include "comm/nccl/nccl_abort.hpp"
#include "support/patience.hpp"

namespace fsdp::test {
namespace {

using std::chrono::steady_clock;
using Links = NcclAbort::Links;

steady_clock::time_point soon_enough() { return steady_clock::now() + patience(); }

}  // namespace

TEST_CASE("an abort begins once, and its first reason stays", "[comm][nccl_abort]") {
  NcclAbort abort;
  CHECK_FALSE(abort.has_begun());
  CHECK(abort.await_links(soon_enough()) == Links::kAreUsed);
  abort.await(soon_enough());
  const auto ended = std::make_shared<std::atomic<int>>(0), told = std::make_shared<std::atomic<int>>(0);
  for (const char* reason : {"a timeout", "an error of the device"})
    abort.begin(reason, [ended] { ++*ended; }, [told] { ++*told; });
  CHECK(abort.has_begun());
  CHECK(abort.reason() == "a timeout");
  CHECK(abort.await_links(soon_enough()) == Links::kHaveEnded);
  abort.await(soon_enough());
  CHECK(*ended == 1);
  CHECK(*told == 1);
}

TEST_CASE("the others are told while NCCL does not return", "[comm][nccl_abort]") {
  NcclAbort abort;
  auto returns = std::make_shared<std::promise<void>>();
  const auto told = std::make_shared<std::promise<void>>();
  abort.begin("a timeout", [returned = returns->get_future().share()] { returned.wait(); },
              [told] { told->set_value(); });
  REQUIRE(told->get_future().wait_until(soon_enough()) == std::future_status::ready);
  CHECK(abort.await_links(steady_clock::now()) == Links::kAreEnding);
  abort.await(steady_clock::now());  // comes back all the same
  returns->set_value();
  CHECK(abort.await_links(soon_enough()) == Links::kHaveEnded);
}

}  // namespace fsdp::test
