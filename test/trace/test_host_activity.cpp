#include <catch2/catch.hpp>

#include "trace/desync/host_activity.hpp"

namespace fsdp::test {
namespace {

using Place = HostActivity::Whereabouts;
using HostState = RankReport::State;

struct Host : HostActivity {
  Host() : HostActivity(log_of_two(), /*rank=*/3) {}

  static std::shared_ptr<const CollectiveLog> log_of_two() {
    auto log = std::make_shared<CollectiveLog>();
    log->introduce(0, "layer0", {});
    log->introduce(1, "layer1", {});
    log->note({.operation = Operation::kAllGather, .ranks = 2, .group = 0});
    return log;
  }
};

}  // namespace

TEST_CASE("a rank in a collective says which one it waits for, and says so no longer when it has left it",
          "[group][host_activity]") {
  Host host;
  CHECK(host.report().state == HostState::kOutside);
  host.enter(Operation::kReduceScatter, 1);
  CHECK(host.report().rank == 3);
  CHECK(host.report().count() == 1);
  CHECK(host.report().state == HostState::kInCollective);
  CHECK(host.report().waits_for == "reduce_scatter of layer1");
  host.leave();
  CHECK(host.report().state == HostState::kOutside);
  CHECK(host.report().waits_for.empty());
}

TEST_CASE("a failure is what a rank says of itself from then on", "[group][host_activity]") {
  Host host;
  host.enter(Operation::kAllGather, 0);
  host.set_failed();
  CHECK(host.report().state == HostState::kFailed);
  host.leave();
  CHECK(host.report().state == HostState::kFailed);
}

TEST_CASE("a host is in the collective before it is in the step", "[group][host_activity]") {
  Host host;
  CHECK(host.snapshot().place == Place::kOutside);
  host.set_in_step(true);
  CHECK(host.snapshot().place == Place::kInStep);
  host.enter(Operation::kAllGather, 0);
  CHECK(host.snapshot().place == Place::kInCollective);
  host.leave();
  CHECK(host.snapshot().place == Place::kInStep);
  host.set_in_step(false);
  CHECK(host.snapshot().place == Place::kOutside);
}

TEST_CASE("the number changes with each collective that is entered or left, and with nothing else",
          "[group][host_activity]") {
  Host host;
  auto last = host.snapshot().number;
  const auto has_changed = [&] { return std::exchange(last, host.snapshot().number) != last; };
  host.set_in_step(true);
  CHECK_FALSE(has_changed());
  for (int i = 0; i < 3; ++i) {
    host.enter(Operation::kAllGather, 0);
    CHECK(has_changed());
    host.enter(Operation::kAllGather, 0);  // the launch was the first, the wait is another
    CHECK(has_changed());
    host.leave();
    CHECK(has_changed());
    host.leave();
    CHECK_FALSE(has_changed());
  }
}

}  // namespace fsdp::test
