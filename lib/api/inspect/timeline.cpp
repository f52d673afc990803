#include "fsdp/timeline.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <fstream>
#include <map>
#include <system_error>

#include "base/require.hpp"
#include "fsdp/fully_shard.hpp"
#include "module/handles.hpp"
#include "module/state/module_state.hpp"

// The Chrome trace format, one event in a line, so that files can be merged line by line.
namespace fsdp {

namespace {

constexpr std::string_view kHead = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[";
constexpr std::string_view kTail = "]}";

std::string json_string(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\')
      (result += '\\') += c;
    else if (static_cast<unsigned char>(c) < 0x20)
      result += fmt::format("\\u{:04x}", static_cast<int>(c));
    else
      result += c;
  }
  return result + "\"";
}

/// The format counts in microseconds.
std::string microseconds(int64_t ns) { return fmt::format("{}.{:03}", ns / 1000, ns % 1000); }

/// Where a timeline stands: a rank's roots count from 0.
struct Track {
  int rank = 0, root = 0;
};

/// A slice of the host's track, or the two ends of a collective, which have a track by themselves.
void add_event(std::vector<std::string>& lines, const Track& track, size_t number, const TimelineEvent& event) {
  const std::string who = fmt::format("\"pid\":{},\"tid\":{}", track.rank, track.root);
  if (event.kind != TimelineEvent::Kind::kCollective) {
    lines.push_back(fmt::format("{{\"ph\":\"X\",\"name\":{},\"cat\":\"{}\",{},\"ts\":{},\"dur\":{}}}",
                                json_string(event.name), to_string(event.kind), who,
                                microseconds(event.begin_ns), microseconds(event.end_ns - event.begin_ns)));
    return;
  }
  const std::string name = fmt::format("\"name\":{},\"cat\":\"collective\",\"id\":\"{}:{}:{}\",{}",
                                       json_string(event.name + " " + event.subject), track.rank, track.root, number, who);
  lines.push_back(fmt::format(
      "{{\"ph\":\"b\",{},\"ts\":{},\"args\":{{\"operation\":{},\"module\":{},\"group\":{},\"ranks\":{},"
      "\"bytes\":{},\"given_up\":{}}}}}",
      name, microseconds(event.begin_ns), json_string(event.name), json_string(event.subject), json_string(event.group),
      event.ranks, event.bytes, event.is_given_up));
  lines.push_back(fmt::format("{{\"ph\":\"e\",{},\"ts\":{}}}", name, microseconds(event.end_ns)));
}

/// One value of each counter.
void add_bytes(std::vector<std::string>& lines, const Track& track, const Timeline& timeline, const TimelineBytes& held) {
  const auto add = [&](const char* what, int64_t bytes) {
    const auto which = track.root == 0 ? "" : fmt::format(" of root {}", track.root);
    lines.push_back(fmt::format(
        "{{\"ph\":\"C\",\"name\":\"{} bytes{}\",\"cat\":\"bytes\",\"pid\":{},\"tid\":{},\"ts\":{},"
        "\"args\":{{\"bytes\":{}}}}}",
        what, which, track.rank, track.root, microseconds(held.time_ns), bytes));
  };
  add("unsharded", held.unsharded);
  add("packed", held.packed);
  add("live", timeline.sharded_bytes + held.unsharded + held.packed);
}

std::string trace(const std::vector<std::string>& lines) {
  std::string text(kHead);
  for (size_t i = 0; i < lines.size(); ++i) text += (i == 0 ? "\n" : ",\n") + lines[i];
  return text + "\n" + std::string(kTail) + "\n";
}

/// Of the last call that failed.
std::string reason() { return std::generic_category().message(errno); }

void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  require(file.good(), "timeline: cannot write {}: {}", path, reason());
}

}  // namespace

const char* to_string(TimelineEvent::Kind kind) {
  switch (kind) {
    case TimelineEvent::Kind::kPhase:
      return "phase";
    case TimelineEvent::Kind::kUse:
      return "use";
    case TimelineEvent::Kind::kRuntime:
      return "runtime";
    case TimelineEvent::Kind::kCollective:
      return "collective";
  }
  return "";
}

std::string timeline_json(const std::vector<Timeline>& ranks) {
  std::vector<std::string> lines;
  std::map<int, int> roots;
  for (const auto& timeline : ranks) {
    const Track track{timeline.rank, roots[timeline.rank]++};
    const auto name = [&](const char* what, const std::string& value) {
      lines.push_back(fmt::format(
          "{{\"ph\":\"M\",\"name\":\"{}\",\"pid\":{},\"tid\":{},\"args\":{{\"name\":{}}}}}", what, track.rank, track.root,
          json_string(value)));
    };
    name("process_name", fmt::format("rank {}", timeline.rank));
    const auto host = track.root == 0 ? "host" : fmt::format("host, root {}", track.root);
    name("thread_name", timeline.dropped == 0 ? host : fmt::format("{} ({} events dropped)", host, timeline.dropped));
    for (size_t i = 0; i < timeline.events.size(); ++i)
      add_event(lines, track, i, timeline.events[i]);
    for (const auto& held : timeline.bytes) add_bytes(lines, track, timeline, held);
  }
  return trace(lines);
}

std::string Timeline::json() const { return timeline_json({*this}); }

void Timeline::write(const std::string& path) const { write_file(path, json()); }

void merge_timelines(const std::vector<std::string>& paths, const std::string& merged) {
  std::vector<std::string> lines;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    require(file.good(), "timeline: cannot read {}: {}", path, reason());
    std::string line;
    std::getline(file, line);
    require(line == kHead, "timeline: {} is not a file that Timeline::write has written", path);
    bool is_whole = false;
    while (!is_whole && std::getline(file, line)) {
      is_whole = line == kTail;
      if (is_whole) break;
      if (line.ends_with(',')) line.pop_back();
      lines.push_back(line);
    }
    require(is_whole, "timeline: {} is not complete; write it again", path);
  }
  write_file(merged, trace(lines));
}

void start_timeline(const FSDPModule& module, size_t max_events) {
  require(max_events > 0, "start_timeline: expected max_events of 1 or more, found 0");
  const auto root = handles::state(module).root();
  std::lock_guard lock(root->context()->mutex());
  auto& comm_ctx = root->context()->runner().comm_ctx();
  comm_ctx.trace.start_timeline(root->request().mesh_info.world_rank(), max_events);
}

Timeline stop_timeline(const FSDPModule& module) {
  const auto root = handles::state(module).root();
  std::lock_guard lock(root->context()->mutex());
  auto& comm_ctx = root->context()->runner().comm_ctx();
  auto timeline = comm_ctx.trace.stop_timeline();
  timeline.sharded_bytes = parameter_bytes(handles::module(root)).sharded;
  return timeline;
}

}  // namespace fsdp
