#include <catch2/catch.hpp>

#include "trace/collective_log.hpp"

namespace fsdp::test {
namespace {

constexpr int kFirst = 0, kSecond = 1;

CollectiveEntry gather(int group, int64_t bytes = 1024) {
  return {.operation = Operation::kAllGather, .ranks = 2, .group = group, .bytes = bytes};
}

struct Log : CollectiveLog {
  Log() {
    introduce(kFirst, "layer0", {"layer0.weight", "layer0.bias"});
    introduce(kSecond, "layer1", {"layer1.weight", "layer1.bias"});
  }
  explicit Log(const std::vector<CollectiveEntry>& entries) : Log() {
    for (const auto& entry : entries) note(entry);
  }
};

}  // namespace

TEST_CASE("the same schedule has the same hash on every rank", "[group][collective_log]") {
  const std::vector<CollectiveEntry> entries = {gather(kFirst), gather(kSecond), gather(kFirst)};
  CHECK(Log(entries).position() == Log(entries).position());
  CHECK(Log(entries).position().count == 3);
}

TEST_CASE("every part of an entry, and the order, is in the hash", "[group][collective_log]") {
  const auto hash = [](const std::vector<CollectiveEntry>& entries) { return Log(entries).position().hash; };
  const auto with = [](auto change) {
    auto entry = gather(kFirst);
    change(entry);
    return entry;
  };
  const std::vector<CollectiveEntry> others = {
      gather(kSecond),
      gather(kFirst, 1025),
      with([](auto& entry) { entry.operation = Operation::kReduceScatter; }),
      with([](auto& entry) { entry.dtype = at::kHalf; }),
      with([](auto& entry) { entry.ranks = 4; }),
      with([](auto& entry) { entry.params = 1; }),
  };
  for (const auto& other : others) CHECK(hash({gather(kFirst)}) != hash({other}));
  CHECK(hash({gather(kFirst), gather(kSecond)}) != hash({gather(kSecond), gather(kFirst)}));
}

TEST_CASE("groups are told apart by their names, not their numbers", "[group][collective_log]") {
  CollectiveLog one, other;
  one.introduce(0, "layer0", {});
  other.introduce(5, "layer0", {});
  one.note(gather(0));
  other.note(gather(5));
  CHECK(one.position() == other.position());
}

TEST_CASE("a step is new if none of the last ones had its collectives", "[group][collective_log]") {
  Log log;
  const auto step = [&](const std::vector<int>& groups) {
    for (const int group : groups) log.note(gather(group));
    return log.end_step();
  };
  CHECK(step({kFirst, kSecond}));
  CHECK_FALSE(step({kFirst, kSecond}));
  CHECK(step({kSecond, kFirst}));
  CHECK_FALSE(step({kFirst, kSecond}));  // training and evaluation take turns
  CHECK_FALSE(step({kSecond, kFirst}));
  CHECK_FALSE(step({}));  // nothing was communicated
  log.note(gather(kFirst));  // a read between steps
  CHECK(step({kFirst, kSecond}));
  log.note(gather(kFirst));
  log.abandon_step();
  CHECK_FALSE(step({kFirst, kSecond}));
}

TEST_CASE("an entry is described by module name, bytes, dtype and ranks", "[group][collective_log]") {
  auto reduce = gather(kSecond, 12345);
  reduce.operation = Operation::kReduceScatter;
  auto partly = reduce;
  partly.params = 0b10;
  const Log log({gather(kFirst), reduce, partly});
  const auto window = log.window();
  REQUIRE(window.entries.size() == 3);
  CHECK(window.entries[0].text == "all_gather of layer0 (1,024 bytes, Float) over 2 ranks");
  CHECK(window.entries[1].text == "reduce_scatter of layer1 (12,345 bytes, Float) over 2 ranks");
  CHECK(window.entries[2].text ==
        "reduce_scatter of layer1 (12,345 bytes, Float, of layer1.bias alone) over 2 ranks");
  CHECK(window.entries[2].hash == log.position().hash);
}

TEST_CASE("the window holds the last entries and says how many came before", "[group][collective_log]") {
  Log log;
  for (int64_t i = 0; i < 300; ++i) log.note(gather(kFirst, i));
  const auto window = log.window();
  CHECK(window.first == 300 - CollectiveLog::kKept);
  REQUIRE(window.entries.size() == CollectiveLog::kKept);
  CHECK(window.entries.front().text == "all_gather of layer0 (44 bytes, Float) over 2 ranks");
  CHECK(window.entries.back().text == "all_gather of layer0 (299 bytes, Float) over 2 ranks");
}

}  // namespace fsdp::test
