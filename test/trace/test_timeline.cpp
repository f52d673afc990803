#include <catch2/catch.hpp>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>

#include "support/models.hpp"

namespace fsdp::test {
namespace {

using Json = nlohmann::json;
using Kind = TimelineEvent::Kind;

/// Two steps of a chain, recorded; and what the statistics say of them.
struct Recorded {
  Timeline timeline;
  StepStatistics counted;
};

Recorded record(const Rank& rank, const DeviceMesh& mesh) {
  ShardedChain chain(mesh);
  chain.step(rank.index());
  const auto before = statistics(chain.root[0]);
  start_timeline(chain.layers[0]);  // any module stands for its root
  chain.step(rank.index(), 1);
  chain.step(rank.index(), 2);
  Recorded recorded{stop_timeline(chain.root[0]), statistics(chain.root[0])};
  recorded.counted.all_gathers -= before.all_gathers;
  recorded.counted.gathered_bytes -= before.gathered_bytes;
  recorded.counted.reductions -= before.reductions;
  recorded.counted.reduced_bytes -= before.reduced_bytes;
  return recorded;
}

std::vector<TimelineEvent> of_kind(const Timeline& timeline, Kind kind) {
  std::vector<TimelineEvent> events;
  for (const auto& event : timeline.events)
    if (event.kind == kind) events.push_back(event);
  return events;
}

}  // namespace

TEST_CASE("a step's phases follow each other, and what the host did lies within them", "[group][timeline]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    const auto timeline = record(rank, rank.mesh()).timeline;
    std::vector<std::string> phases;
    int64_t end = 0;
    for (const auto& phase : of_kind(timeline, Kind::kPhase)) {
      phases.push_back(phase.name);
      rank.check(phase.begin_ns >= end && phase.end_ns >= phase.begin_ns, "phases do not overlap");
      end = phase.end_ns;
    }
    rank.check_equal(phases,
                     std::vector<std::string>{"between steps", "forward", "backward", "between steps", "forward",
                                              "backward", "between steps"},
                     "phases");
    // Slices of one track nest: each begins and ends within those that are open.
    std::vector<TimelineEvent> open;
    std::set<std::string> uses, work;
    for (const auto& event : timeline.events) {
      if (event.kind == Kind::kCollective) continue;
      while (!open.empty() && open.back().end_ns <= event.begin_ns) open.pop_back();
      rank.check(open.empty() || event.kind == Kind::kPhase || event.end_ns <= open.back().end_ns,
                 fmt::format("{} lies within {}", event.name, open.empty() ? "" : open.back().name));
      open.push_back(event);
      if (event.kind == Kind::kUse) uses.insert(event.name);
      if (event.kind == Kind::kRuntime) work.insert(event.name);
    }
    rank.check(uses == std::set<std::string>{"layer0", "layer1", "layer2", "root"}, fmt::format("uses: {}", uses));
    for (const char* name : {"FSDP::all_gather (layer1)", "FSDP::all_gather_wait (layer1)",
                             "FSDP::all_gather_copy_out (layer1)", "FSDP::reshard (layer1)",
                             "FSDP::post_backward_reduce (layer1)", "FSDP::reduce_scatter_wait (layer1)"})
      rank.check(work.count(name) == 1, name);
  }));
}

TEST_CASE("a timeline's collectives are those of the statistics, in launch order, to the byte",
          "[group][timeline]") {
  CHECK(on_ranks(4, [](Rank& rank) {
    for (const auto& mesh : {rank.mesh(), rank.hybrid(2, 2)}) {
      rank.log().clear();
      const auto [timeline, counted] = record(rank, mesh);
      StepStatistics seen;
      std::vector<std::string> names;
      int64_t last = 0;
      for (const auto& event : of_kind(timeline, Kind::kCollective)) {
        rank.check(event.begin_ns >= last && event.end_ns >= event.begin_ns, event.name + ": in order");
        last = event.begin_ns;
        names.push_back(event.name + " " + event.subject);
        rank.check_equal(event.ranks, event.name == "all_reduce" ? 2 : mesh.ndim() == 2 ? 2 : 4, "ranks");
        rank.check(event.group.find('[') != std::string::npos || event.group == "world", "group: " + event.group);
        if (event.name == "all_gather") ++seen.all_gathers, seen.gathered_bytes += event.bytes;
        if (event.name == "reduce_scatter") ++seen.reductions, seen.reduced_bytes += event.bytes;
      }
      rank.check_equal(seen.all_gathers, counted.all_gathers, "all-gathers");
      rank.check_equal(seen.gathered_bytes, counted.gathered_bytes, "gathered bytes");
      rank.check_equal(seen.reductions, counted.reductions, "reductions");
      rank.check_equal(seen.reduced_bytes, counted.reduced_bytes, "reduced bytes");
      const auto calls = rank.calls();
      const std::vector<std::string> recorded(calls.end() - static_cast<ptrdiff_t>(names.size()), calls.end());
      rank.check_equal(names, recorded, "as launched");
    }
  }));
}

TEST_CASE("a timeline counts the bytes that are gathered and packed, from its beginning to its end", "[group][timeline]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    chain.step(rank.index());
    start_timeline(chain.root[0]);
    chain.step(rank.index(), 1);
    const auto timeline = stop_timeline(chain.root[0]);
    const auto report = chain.root[0].report();
    int64_t most_unsharded = 0, most_packed = 0, last = 0;
    for (const auto& held : timeline.bytes) {
      most_unsharded = std::max(most_unsharded, held.unsharded);
      most_packed = std::max(most_packed, held.packed);
      rank.check(held.time_ns >= last && held.unsharded >= 0 && held.packed >= 0, "in order, and none is negative");
      last = held.time_ns;
    }
    rank.check_equal(most_unsharded, report.last_step_peak_bytes, "peak");
    rank.check_equal(timeline.bytes.back().unsharded, report.bytes.unsharded, "at the end");
    rank.check_equal(timeline.bytes.back().packed, int64_t{0}, "no reduction is left");
    rank.check_equal(timeline.sharded_bytes, report.bytes.sharded, "shards");
    int64_t largest = 0;
    for (const auto& group : report.groups) largest = std::max(largest, group.unsharded_bytes);
    rank.check(most_packed >= largest, "the largest group's gradients were packed");
  }));
}

TEST_CASE("the trace is JSON that says the same, one process for each rank, whatever modules are called",
          "[group][timeline]") {
  std::mutex mutex;
  std::vector<Timeline> timelines(2);
  CHECK(on_ranks(2, [&](Rank& rank) {
    auto timeline = record(rank, rank.mesh()).timeline;
    timeline.events.back().name = "odd \"name\"\\\n\x01";
    rank.check_equal(timeline.rank, rank.index(), "rank");
    std::lock_guard lock(mutex);
    timelines[static_cast<size_t>(rank.index())] = std::move(timeline);
  }));
  const auto events = Json::parse(timeline_json(timelines)).at("traceEvents");
  for (const auto& timeline : timelines) {
    std::map<std::string, int64_t> begun, ended;
    size_t slices = 0, collectives = 0;
    int64_t bytes = 0;
    bool has_odd_name = false;
    std::string process;
    for (const auto& event : events) {
      if (event.at("pid") != timeline.rank) continue;
      const std::string phase = event.at("ph");
      if (phase == "M" && event.at("name") == "process_name") process = event.at("args").at("name");
      if (phase == "X") {
        ++slices;
        CHECK(event.at("dur").get<double>() >= 0);
        has_odd_name |= event.at("name") == "odd \"name\"\\\n\x01";
      }
      if (phase == "b") {
        ++collectives;
        bytes += event.at("args").at("bytes").get<int64_t>();
        CHECK(begun.emplace(event.at("id"), event.at("ts").get<double>()).second);
      }
      if (phase == "e") ended.emplace(event.at("id"), event.at("ts").get<double>());
    }
    CHECK(process == fmt::format("rank {}", timeline.rank));
    CHECK(has_odd_name);
    CHECK(slices + collectives == timeline.events.size());
    CHECK(begun.size() == collectives);
    for (const auto& [id, at] : begun) CHECK(ended.at(id) >= at);
    int64_t expected = 0;
    for (const auto& event : of_kind(timeline, Kind::kCollective)) expected += event.bytes;
    CHECK(bytes == expected);
    CHECK(bytes > 0);
  }
}

namespace {

int64_t nanoseconds(const Json& event, const char* field) { return std::llround(event.at(field).get<double>() * 1000); }

/// Slices of one track that a viewer would not drop: each ends before the one around it.
bool is_nested(const Json& events, int rank) {
  std::vector<int64_t> open;  // ends
  for (const auto& event : events) {
    if (event.at("ph") != "X" || event.at("pid") != rank) continue;
    const int64_t begin = nanoseconds(event, "ts"), end = begin + nanoseconds(event, "dur");
    while (!open.empty() && open.back() <= begin) open.pop_back();
    if (!open.empty() && end > open.back()) return false;
    open.push_back(end);
  }
  return true;
}

/// Slices that follow each other within a phase, at a time of this century.
Timeline close_slices(int rank, int64_t begin_ns) {
  Timeline timeline{.rank = rank, .events = {}};
  timeline.events.push_back({.kind = Kind::kPhase, .name = "forward", .begin_ns = begin_ns, .end_ns = begin_ns + 997});
  for (int64_t i = 0; i < 200; ++i) {
    const int64_t at = begin_ns + 4 * i;
    timeline.events.push_back({.kind = Kind::kUse, .name = "layer", .begin_ns = at, .end_ns = at + 4});
    timeline.events.push_back({.kind = Kind::kRuntime, .name = "work", .begin_ns = at + 1, .end_ns = at + 4});
  }
  timeline.bytes.push_back({.time_ns = begin_ns + 5, .unsharded = 1});
  return timeline;
}

constexpr int64_t kThisCentury = 1'795'865'874'123'456'789;

}  // namespace

TEST_CASE("to who reads times as doubles a trace says them to the nanosecond, and its slices nest", "[group][timeline]") {
  const auto timeline = close_slices(0, kThisCentury);
  const auto trace = Json::parse(timeline.json());
  const int64_t base = trace.value("baseTimeNanoseconds", int64_t{0});
  CHECK(is_nested(trace.at("traceEvents"), 0));
  size_t slice = 0, wrong = 0;
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("ph") != "X") continue;
    const auto& [kind, name, begin_ns, end_ns, subject, group, ranks, bytes, is_given_up] = timeline.events.at(slice++);
    wrong += base + nanoseconds(event, "ts") != begin_ns || nanoseconds(event, "dur") != end_ns - begin_ns;
  }
  CHECK(slice == timeline.events.size());
  CHECK(wrong == 0);
  CHECK(on_ranks(2, [](Rank& rank) {
    const auto events = Json::parse(record(rank, rank.mesh()).timeline.json()).at("traceEvents");
    rank.check(is_nested(events, rank.index()), "two steps");
  }));
}

TEST_CASE("merged files keep their times to each other", "[group][timeline]") {
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("fsdp_timeline_times_{}", ::getpid());
  std::filesystem::create_directory(folder);
  const auto path = [&](const std::string& name) { return (folder / name).string(); };
  const std::vector<Timeline> ranks = {close_slices(0, kThisCentury + 12'345'678'901), close_slices(1, kThisCentury)};
  for (const auto& timeline : ranks) timeline.write(path(fmt::format("rank{}.json", timeline.rank)));
  merge_timelines({path("rank0.json"), path("rank1.json")}, path("all.json"));
  std::ifstream file(path("all.json"));
  CHECK(Json::parse(file) == Json::parse(timeline_json(ranks)));
  std::filesystem::remove_all(folder);
}

TEST_CASE("the ranks' files are merged into one", "[group][timeline]") {
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("fsdp_timeline_{}", ::getpid());
  std::filesystem::create_directory(folder);
  const auto path = [&](const std::string& name) { return (folder / name).string(); };
  CHECK(on_ranks(3, [&](Rank& rank) {
    record(rank, rank.mesh()).timeline.write(path(fmt::format("rank{}.json", rank.index())));
    rank.check(true, "written");
  }));
  merge_timelines({path("rank0.json"), path("rank1.json"), path("rank2.json")}, path("all.json"));
  std::ifstream merged(path("all.json"));
  std::set<int> ranks;
  size_t count = 0;
  const auto events = Json::parse(merged).at("traceEvents");
  for (const auto& event : events) ranks.insert(event.at("pid").get<int>()), ++count;
  CHECK(ranks == std::set<int>{0, 1, 2});
  size_t apart = 0;
  for (int rank = 0; rank < 3; ++rank) {
    std::ifstream file(path(fmt::format("rank{}.json", rank)));
    apart += Json::parse(file).at("traceEvents").size();
  }
  CHECK(count == apart);
  std::ofstream(path("other.json")) << "[]\n";
  CHECK_THROWS_AS(merge_timelines({path("other.json")}, path("all.json")), UsageError);
  CHECK_THROWS_AS(merge_timelines({path("absent.json")}, path("all.json")), UsageError);
  CHECK_THROWS_AS(Timeline().write(path("no/such/folder.json")), UsageError);
  std::filesystem::remove_all(folder);
}

TEST_CASE("a gather that nobody waits for is marked as given up", "[group][timeline]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    start_timeline(chain.root[0]);
    const auto handle = chain.layers[1].unshard_async();
    chain.layers[1].reshard();
    const auto collectives = of_kind(stop_timeline(chain.root[0]), Kind::kCollective);
    rank.check_equal(collectives.size(), size_t{1}, "collectives");
    rank.check(!collectives.empty() && collectives[0].is_given_up, "given up");
  }));
}

TEST_CASE("one rank alone has phases and uses, and a full recorder says what it dropped", "[group][timeline]") {
  CHECK(on_ranks(1, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    start_timeline(chain.root[0]);
    chain.step(0);
    const auto timeline = stop_timeline(chain.root[0]);
    rank.check_equal(of_kind(timeline, Kind::kPhase).size(), size_t{4}, "phases");
    rank.check(!of_kind(timeline, Kind::kUse).empty(), "uses");
    rank.check(of_kind(timeline, Kind::kCollective).empty(), "nothing is communicated");
    rank.check_equal(timeline.dropped, int64_t{0}, "room for all");
    // From the second step on what comes next is known, and there are ranges of prefetches.
    start_timeline(chain.root[0]);
    chain.step(0);
    const auto later = stop_timeline(chain.root[0]);
    start_timeline(chain.root[0], 3);
    chain.step(0);
    const auto full = stop_timeline(chain.root[0]);
    rank.check_equal(full.events.size(), size_t{3}, "as many as there is room for");
    rank.check_equal(full.bytes.size(), size_t{3}, "and of counted bytes");
    rank.check_equal(full.dropped, static_cast<int64_t>(later.events.size() + later.bytes.size()) - 6, "dropped");
    rank.check_throws<StateError>([&] { stop_timeline(chain.root[0]); }, {"start_timeline"}, "none started");
  }));
}

}  // namespace fsdp::test
