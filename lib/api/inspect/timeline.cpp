#include "fsdp/timeline.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <limits>
#include <map>
#include <optional>
#include <system_error>
#include <utility>

#include "base/require.hpp"
#include "fsdp/fully_shard.hpp"
#include "module/handles.hpp"
#include "module/state/module_state.hpp"

// The Chrome trace format, one event in a line, so that files can be merged line by line.
namespace fsdp {

namespace {

// Viewers read times as doubles of microseconds. Since the epoch these are so large that a quarter of one is lost, and slices
// that follow each other overlap. So they count from a base, which the head of the file tells.
constexpr std::string_view kHeadBegin = "{\"displayTimeUnit\":\"ms\",\"baseTimeNanoseconds\":";
constexpr std::string_view kHeadEnd = ",\"traceEvents\":[";
constexpr std::string_view kTail = "]}";
constexpr std::string_view kTime = "\"ts\":";  // in no string: there, quotes are escaped

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
  int64_t base_ns = 0;  ///< of its times

  std::string at(int64_t ns) const { return fmt::format("{}{}", kTime, microseconds(ns - base_ns)); }
};

/// A slice of the host's track, or the two ends of a collective, which have a track by themselves.
void add_event(std::vector<std::string>& lines, const Track& track, size_t number, const TimelineEvent& event) {
  const std::string who = fmt::format("\"pid\":{},\"tid\":{}", track.rank, track.root);
  if (event.kind != TimelineEvent::Kind::kCollective) {
    lines.push_back(fmt::format("{{\"ph\":\"X\",\"name\":{},\"cat\":\"{}\",{},{},\"dur\":{}}}",
                                json_string(event.name), to_string(event.kind), who, track.at(event.begin_ns),
                                microseconds(event.end_ns - event.begin_ns)));
    return;
  }
  const std::string name = fmt::format("\"name\":{},\"cat\":\"collective\",\"id\":\"{}:{}:{}\",{}",
                                       json_string(event.name + " " + event.subject), track.rank, track.root, number, who);
  lines.push_back(fmt::format(
      "{{\"ph\":\"b\",{},{},\"args\":{{\"operation\":{},\"module\":{},\"group\":{},\"ranks\":{},"
      "\"bytes\":{},\"given_up\":{}}}}}",
      name, track.at(event.begin_ns), json_string(event.name), json_string(event.subject), json_string(event.group),
      event.ranks, event.bytes, event.is_given_up));
  lines.push_back(fmt::format("{{\"ph\":\"e\",{},{}}}", name, track.at(event.end_ns)));
}

/// One value of each counter.
void add_bytes(std::vector<std::string>& lines, const Track& track, const Timeline& timeline, const TimelineBytes& held) {
  const auto add = [&](const char* what, int64_t bytes) {
    const auto which = track.root == 0 ? "" : fmt::format(" of root {}", track.root);
    lines.push_back(fmt::format(
        "{{\"ph\":\"C\",\"name\":\"{} bytes{}\",\"cat\":\"bytes\",\"pid\":{},\"tid\":{},{},"
        "\"args\":{{\"bytes\":{}}}}}",
        what, which, track.rank, track.root, track.at(held.time_ns), bytes));
  };
  add("unsharded", held.unsharded);
  add("packed", held.packed);
  add("live", timeline.sharded_bytes + held.unsharded + held.packed);
}

std::string trace(const std::vector<std::string>& lines, int64_t base_ns) {
  std::string text = fmt::format("{}{}{}", kHeadBegin, base_ns, kHeadEnd);
  for (size_t i = 0; i < lines.size(); ++i) text += (i == 0 ? "\n" : ",\n") + lines[i];
  return text + "\n" + std::string(kTail) + "\n";
}

/// The first time of all.
int64_t base_of(const std::vector<Timeline>& ranks) {
  int64_t base_ns = std::numeric_limits<int64_t>::max();
  for (const auto& timeline : ranks) {
    for (const auto& event : timeline.events) base_ns = std::min(base_ns, event.begin_ns);
    for (const auto& held : timeline.bytes) base_ns = std::min(base_ns, held.time_ns);
  }
  return base_ns == std::numeric_limits<int64_t>::max() ? 0 : base_ns;
}

/// A file's base from its first line; nullopt: another program has written it.
std::optional<int64_t> read_base(std::string_view head) {
  if (!head.starts_with(kHeadBegin) || !head.ends_with(kHeadEnd)) return std::nullopt;
  head.remove_prefix(kHeadBegin.size());
  int64_t base_ns = 0;
  const auto [end, error] = std::from_chars(head.data(), head.data() + head.size(), base_ns);
  const bool is_whole = error == std::errc() && std::string_view(end, head.data() + head.size()) == kHeadEnd;
  return is_whole ? std::optional(base_ns) : std::nullopt;
}

/// A line of a file whose base is so much later.
std::string shifted(const std::string& line, int64_t ns) {
  const size_t found = line.find(kTime);
  if (found == std::string::npos || ns == 0) return line;
  const size_t begin = found + kTime.size(), end = line.find_first_not_of("0123456789.", begin);
  std::string digits = line.substr(begin, end - begin);
  std::erase(digits, '.');
  return line.substr(0, begin) + microseconds(std::stoll(digits) + ns) + line.substr(end);
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
  const int64_t base_ns = base_of(ranks);
  for (const auto& timeline : ranks) {
    const Track track{timeline.rank, roots[timeline.rank]++, base_ns};
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
  return trace(lines, base_ns);
}

std::string Timeline::json() const { return timeline_json({*this}); }

void Timeline::write(const std::string& path) const { write_file(path, json()); }

void merge_timelines(const std::vector<std::string>& paths, const std::string& merged) {
  std::vector<std::pair<int64_t, std::string>> lines;  // with their file's base
  int64_t base_ns = std::numeric_limits<int64_t>::max();
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    require(file.good(), "timeline: cannot read {}: {}", path, reason());
    std::string line;
    std::getline(file, line);
    const auto base = read_base(line);
    require(base.has_value(), "timeline: {} is not a file that Timeline::write has written", path);
    base_ns = std::min(base_ns, *base);
    bool is_whole = false;
    while (!is_whole && std::getline(file, line)) {
      is_whole = line == kTail;
      if (is_whole) break;
      if (line.ends_with(',')) line.pop_back();
      lines.emplace_back(*base, line);
    }
    require(is_whole, "timeline: {} is not complete; write it again", path);
  }
  std::vector<std::string> all;
  for (const auto& [base, line] : lines) all.push_back(shifted(line, base - base_ns));
  write_file(merged, trace(all, lines.empty() ? 0 : base_ns));
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
