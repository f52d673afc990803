#include <catch2/catch.hpp>

#include "comm/c10d/c10d_work.hpp"
#include "comm/peer_connections.hpp"
#include "comm/single_rank.hpp"
#include "fsdp/error.hpp"

namespace fsdp::test {
namespace {

using Catch::Contains;

/// A work whose wait for a moment is over before it is done, until it has been tried so often.
class SlowWork final : public c10d::Work {
 public:
  explicit SlowWork(int slices, std::function<void()> in_slice = {})
      : slices_(slices), in_slice_(std::move(in_slice)) {}

  bool isCompleted() override { return slices_ <= 0; }
  bool wait(std::chrono::milliseconds timeout) override {
    if (timeout == kNoTimeout || slices_-- <= 0) return true;
    was_sliced = true;
    if (in_slice_) in_slice_();
    std::this_thread::sleep_for(timeout);
    throw std::runtime_error("Timed out waiting 200ms\nException raised from somewhere");
  }
  bool was_sliced = false;

 private:
  int slices_;
  std::function<void()> in_slice_;
};

class BrokenWork final : public c10d::Work {
 public:
  bool isCompleted() override { return false; }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    throw std::runtime_error("the peer is gone\nException raised from somewhere");
  }
};

/// What happened to connections.
class CountedConnections final : public HasPeerConnections {
 public:
  void disconnect() noexcept override { ++disconnects; }
  void fail_stuck_waits() noexcept override { ++asked; }
  int disconnects = 0, asked = 0;
};

struct WorkOfGroup {
  std::shared_ptr<CountedConnections> connections = std::make_shared<CountedConnections>();
  std::shared_ptr<C10dFailure> failure = std::make_shared<C10dFailure>(connections.get());
  std::shared_ptr<fsdp::Work> made(c10::intrusive_ptr<c10d::Work> work, HostWait how) const {
    const auto group = single_rank_on(c10::DeviceType::CPU);
    return c10d_work(std::move(work), failure, CollectiveInfo("all_gather", "layer0", *group, 8), how);
  }
};

}  // namespace

TEST_CASE("a host that waits in slices waits until the work is done, and one that does not asks once", "[comm][c10d_work]") {
  for (const auto how : {HostWait::kInSlices, HostWait::kAtOnce}) {
    const WorkOfGroup group;
    const auto slow = c10::make_intrusive<SlowWork>(2);
    const auto work = group.made(slow, how);
    CHECK_FALSE(work->is_completed());
    work->wait();
    CHECK(work->is_completed());
    CHECK(slow.use_count() == 1);  // its tensors go with it
    CHECK(slow->was_sliced == (how == HostWait::kInSlices));
    CHECK((group.connections->asked > 0) == slow->was_sliced);
    work->wait();
  }
}

TEST_CASE("an abort ends the wait after a slice, and says why", "[comm][c10d_work]") {
  const WorkOfGroup group;
  const auto work =
      group.made(c10::make_intrusive<SlowWork>(1000, [&] { group.failure->set("the user gave up"); }), HostWait::kInSlices);
  CHECK_THROWS_WITH(work->wait(), Contains("all_gather of 'layer0'") && Contains("failed: the user gave up"));
  CHECK_THROWS_WITH(work->wait(), Contains("failed: the user gave up"));
  CHECK(work->is_completed());
  CHECK(group.connections->disconnects == 0);  // whoever aborts does that
}

TEST_CASE("a work that fails fails its group, with the first line of what c10d says", "[comm][c10d_work]") {
  for (const auto how : {HostWait::kInSlices, HostWait::kAtOnce}) {
    const WorkOfGroup group;
    const auto work = group.made(c10::make_intrusive<BrokenWork>(), how);
    CHECK_THROWS_AS(work->wait(), CommError);
    REQUIRE(group.failure->is_set());
    CHECK(group.failure->reason() == "the peer is gone");
    CHECK_THROWS_AS(group.made(c10::make_intrusive<BrokenWork>(), how)->wait(), CommError);
    CHECK(group.connections->disconnects == 1);
  }
}

}  // namespace fsdp::test
