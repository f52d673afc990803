#include "trace/timeline_recorder.hpp"

#include <algorithm>
#include <chrono>

namespace fsdp {

namespace {

template <class Clock>
int64_t nanoseconds_of() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

}  // namespace

TimelineRecorder::TimelineRecorder(int rank, size_t max_events)
    : max_events_(max_events), offset_ns_(nanoseconds_of<std::chrono::system_clock>() -
                                            nanoseconds_of<std::chrono::steady_clock>()) {
  timeline_.rank = rank;
}

int64_t TimelineRecorder::now_ns() const { return nanoseconds_of<std::chrono::steady_clock>() + offset_ns_; }

void TimelineRecorder::open(TimelineEvent::Kind kind, std::string name) {
  size_t event = kNone;
  if (timeline_.events.size() < max_events_) {
    event = timeline_.events.size();
    timeline_.events.push_back({.kind = kind, .name = std::move(name), .begin_ns = now_ns()});
  } else {
    ++timeline_.dropped;
  }
  open_.push_back({event, kind});
}

void TimelineRecorder::close() {
  if (open_.back().event != kNone) timeline_.events[open_.back().event].end_ns = now_ns();
  open_.pop_back();
}

void TimelineRecorder::begin_phase(const char* name) {
  while (!open_.empty()) close();
  open(TimelineEvent::Kind::kPhase, name);
}

void TimelineRecorder::begin_use(const std::string& group) {
  if (innermost_is(TimelineEvent::Kind::kPhase)) open(TimelineEvent::Kind::kUse, group);
}

void TimelineRecorder::end_use() {
  if (innermost_is(TimelineEvent::Kind::kUse)) close();
}

void TimelineRecorder::begin_slice(std::string name) {
  open(TimelineEvent::Kind::kRuntime, std::move(name));
}

void TimelineRecorder::end_slice() {
  // A phase that ended inside of it has taken it along.
  if (innermost_is(TimelineEvent::Kind::kRuntime)) close();
}

void TimelineRecorder::begin_collective(TimelineEvent collective) {
  last_launched_ = kNone;
  if (timeline_.events.size() >= max_events_) {
    ++timeline_.dropped;
    return;
  }
  collective.kind = TimelineEvent::Kind::kCollective;
  collective.begin_ns = now_ns();
  last_launched_ = timeline_.events.size();
  launched_.push_back(last_launched_);
  timeline_.events.push_back(std::move(collective));
}

void TimelineRecorder::set_bytes(int64_t bytes) {
  if (last_launched_ != kNone) timeline_.events[last_launched_].bytes = bytes;
}

void TimelineRecorder::end_collective(const char* operation, const std::string& subject, bool is_given_up) {
  const auto found = std::find_if(launched_.begin(), launched_.end(), [&](size_t event) {
    return timeline_.events[event].name == operation && timeline_.events[event].subject == subject;
  });
  if (found == launched_.end()) return;  // launched before the recording began
  timeline_.events[*found].end_ns = now_ns();
  timeline_.events[*found].is_given_up = is_given_up;
  launched_.erase(found);
}

void TimelineRecorder::count_bytes(int64_t unsharded, int64_t packed) {
  if (timeline_.bytes.size() < max_events_)
    timeline_.bytes.push_back({now_ns(), unsharded, packed});
  else
    ++timeline_.dropped;
}

Timeline TimelineRecorder::take() {
  while (!open_.empty()) close();
  for (const size_t event : launched_) timeline_.events[event].end_ns = now_ns();
  launched_.clear();
  last_launched_ = kNone;
  return std::move(timeline_);
}

}  // namespace fsdp
