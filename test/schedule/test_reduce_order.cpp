// When packed reductions start: in the order of packing, and by the option.
#include <catch2/catch.hpp>
#include <deque>
#include <random>
#include <vector>

#include "schedule/reduce_order.hpp"

namespace fsdp::test {
namespace {

/// A root's groups in the middle of a backward that goes as the last one did, from the highest number down.
class Backward {
 public:
  explicit Backward(const std::vector<int64_t>& bytes, bool reduces_apart = true) {
    for (const auto size : bytes) groups.add({.unsharded_bytes = size, .reduce = {.ranks = 0, .is_apart = reduces_apart}});
    for (int pass = 0; pass < 2; ++pass) {
      order.begin_pass();
      if (pass == 0)
        for (int group = size() - 1; group >= 0; --group) order.use(group);
    }
  }

  int size() const { return static_cast<int>(groups.size()); }
  /// The group is used, and what has waited for that starts.
  size_t use(int group) {
    order.use(group);
    return reductions.on_use(std::vector{group});
  }
  /// The group has been released, and another is being gathered in its room.
  ReduceStart pack(int group, int gathered, ReduceScatterStart start) {
    groups.set_residency(group, Residency::kReleased);
    if (gathered != -1) groups.set_residency(gathered, Residency::kUnsharding);
    return reductions.on_packed(group, gathered, start, groups, order);
  }

  GroupStates groups;
  ExecOrder order;
  ReduceOrder reductions;
};

using enum ReduceScatterStart;

}  // namespace

TEST_CASE("a reduction starts at once where nothing can compete with it", "[group][reduce_order]") {
  for (const auto start : kReduceScatterStarts) {
    CAPTURE(name_of(start));
    Backward shared({1, 9, 1}, /*reduces_apart=*/false);
    shared.use(2);
    CHECK(shared.pack(2, 1, start) == ReduceStart::kNow);
    Backward apart({1, 9, 1});
    apart.use(2);
    CHECK(apart.pack(2, /*gathered=*/-1, start) == ReduceStart::kNow);
    Backward other_ranks({1, 9, 1});
    other_ranks.groups.add({.unsharded_bytes = 1, .reduce = {.ranks = 3, .is_apart = true}});
    other_ranks.use(2);
    CHECK(other_ranks.pack(2, 1, start) == ReduceStart::kNow);
    other_ranks.groups.remove(3);
    CHECK(other_ranks.groups.have_same_ranks());
  }
}

TEST_CASE("by size, a reduction waits for the use of a group that is larger than all before it, and others behind it",
          "[group][reduce_order]") {
  Backward backward({1, 9, 2, 1});
  backward.use(3);
  CHECK(backward.pack(3, 2, kBySize) == ReduceStart::kWaits);  // nothing is used in front of 2
  CHECK(backward.use(2) == 1);
  CHECK(backward.pack(2, 1, kBySize) == ReduceStart::kWaits);
  CHECK(backward.pack(2, -1, kBySize) == ReduceStart::kWaits);  // behind that one
  CHECK(backward.use(1) == 2);
  CHECK(backward.pack(1, 0, kBySize) == ReduceStart::kNow);  // behind the last gather there are only reductions
  CHECK(backward.reductions.all() == 0);
}

TEST_CASE("behind the next backward, the first of a backward waits for it", "[group][reduce_order]") {
  Backward backward({1, 1, 1});
  for (int step = 0; step < 2; ++step) {
    CAPTURE(step);
    backward.reductions.begin_backward();
    backward.use(2);
    CHECK(backward.reductions.on_next_backward() == 0);
    CHECK(backward.pack(2, 1, kFirstAfterNextBackward) == ReduceStart::kWaits);
    CHECK(backward.use(1) == 0);
    CHECK(backward.reductions.on_next_backward() == 1);
    CHECK(backward.pack(1, 0, kFirstAfterNextBackward) == ReduceStart::kNow);
  }
}

TEST_CASE("behind the gather, the first of a backward is held by the network, or waits for the use", "[group][reduce_order]") {
  Backward backward({1, 1, 1, 1});
  for (const bool can_hold : {true, false}) {
    CAPTURE(can_hold);
    backward.reductions.begin_backward();
    CHECK(backward.pack(3, 2, kFirstAfterAllGather) == ReduceStart::kBehindGather);
    if (!can_hold) backward.reductions.wait_for_use(3, 2);
    CHECK(backward.pack(2, 1, kFirstAfterAllGather) == (can_hold ? ReduceStart::kNow : ReduceStart::kWaits));
    CHECK(backward.reductions.on_use(std::vector{1}) == 0);
    CHECK(backward.reductions.on_use(std::vector{1, 2}) == (can_hold ? 0 : 2));
  }
}

TEST_CASE("a group that is gone holds nothing back", "[group][reduce_order]") {
  Backward backward({1, 9, 2, 1});
  backward.reductions.wait_for_use(3, 2);
  backward.reductions.wait_for_use(2, 1);
  backward.reductions.drop(2);  // its own reduction, and what the other one waits for
  CHECK(backward.reductions.on_use({}) == 1);
  CHECK(backward.reductions.all() == 0);
}

/// Of whichever events: each that is packed starts once, and none in front of an older one.
TEST_CASE("all reductions start, in the order of packing", "[group][reduce_order]") {
  size_t waits = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 draw(seed);
    std::vector<int64_t> bytes(2 + draw() % 6);
    for (auto& size : bytes) size = 1 + static_cast<int64_t>(draw() % 9);
    Backward backward(bytes);
    const auto start = kReduceScatterStarts[draw() % kReduceScatterStarts.size()];
    size_t packed = 0, started = 0;
    backward.reductions.begin_backward();
    for (int group = backward.size() - 1; group >= 0; --group) {
      started += backward.use(group);
      if (draw() % 4 == 0 && started < packed) {
        backward.reductions.note_started();
        ++started;
      }
      started += backward.reductions.on_next_backward();
      ++packed;
      const auto answer = backward.pack(group, draw() % 4 == 0 ? -1 : group - 1, start);
      if (answer == ReduceStart::kBehindGather && draw() % 2 == 0)
        backward.reductions.wait_for_use(group, group - 1);
      else if (answer != ReduceStart::kWaits) {
        CHECK(started + 1 == packed);  // all older ones have
        ++started;
      }
      waits += packed - started;
      REQUIRE(started <= packed);
    }
    CHECK(started + backward.reductions.all() == packed);
  }
  CHECK(waits > 100);
}

}  // namespace fsdp::test
