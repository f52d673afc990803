#include "extension/simulated_device/simulated_streams.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

namespace fsdp::bench {

namespace {
/// Microseconds that are nothing: sums of shares are not exact.
constexpr double kNothing = 1e-7;
}  // namespace

size_t SimulatedStreams::add_stream() {
  std::lock_guard lock(mutex_);
  streams_.emplace_back();
  return streams_.size() - 1;
}

size_t SimulatedStreams::add_queue() {
  std::lock_guard lock(mutex_);
  queues_.emplace_back();
  return queues_.size() - 1;
}

SimulatedStreams::Moment SimulatedStreams::add(size_t stream, Operation operation) {
  operation.moment = std::make_shared<SimulatedMoment>();
  auto moment = operation.moment;
  if (operation.is_collective) queues_.at(operation.queue).push_back(moment);
  streams_.at(stream).push_back(std::move(operation));
  return moment;
}

void SimulatedStreams::compute(size_t stream, double us, std::string name) {
  std::lock_guard lock(mutex_);
  auto moment = add(stream, {.time_left = us});
  slices_.push_back({.name = std::move(name), .alone_us = us, .launched_us = now_us_, .moment = std::move(moment)});
}

SimulatedStreams::Moment SimulatedStreams::collective(size_t stream, size_t queue, double latency_us, double sending_us,
                                                      double bytes, std::string name) {
  std::lock_guard lock(mutex_);
  auto moment = add(stream, {.is_collective = true, .queue = queue, .time_left = latency_us, .sending_left = sending_us});
  slices_.push_back({.name = std::move(name),
                     .bytes = bytes,
                     .alone_us = latency_us + sending_us,
                     .launched_us = now_us_,
                     .moment = moment});
  return moment;
}

SimulatedStreams::Moment SimulatedStreams::record(size_t stream) {
  std::lock_guard lock(mutex_);
  return add(stream, {});
}

void SimulatedStreams::wait(size_t stream, Moment moment) {
  std::lock_guard lock(mutex_);
  add(stream, {.after = std::move(moment)});
}

bool SimulatedStreams::is_done(const SimulatedMoment& moment) {
  std::lock_guard lock(mutex_);
  end_what_is_done();
  return moment.is_done;
}

void SimulatedStreams::synchronize(const SimulatedMoment& moment) {
  std::lock_guard lock(mutex_);
  end_what_is_done();
  while (!moment.is_done)
    if (!go_on()) throw std::logic_error("simulated device: what the host waits for never ends");
}

void SimulatedStreams::synchronize_all() {
  std::lock_guard lock(mutex_);
  end_what_is_done();
  while (go_on()) {
  }
  if (std::ranges::any_of(streams_, [](const auto& stream) { return !stream.empty(); }))
    throw std::logic_error("simulated device: streams wait for each other");
}

double SimulatedStreams::now_us() const {
  std::lock_guard lock(mutex_);
  return now_us_;
}

std::vector<SimulatedSlice> SimulatedStreams::take_slices() {
  std::lock_guard lock(mutex_);
  return std::exchange(slices_, {});
}

/// Of the first of its stream.
bool SimulatedStreams::may_run(const Operation& operation) const {
  return (!operation.after || operation.after->is_done) &&
         (!operation.is_collective || queues_[operation.queue].front() == operation.moment);
}

/// The end of one operation may be what others have waited for.
void SimulatedStreams::end_what_is_done() {
  for (bool has_ended = true; std::exchange(has_ended, false);)
    for (auto& stream : streams_)
      while (!stream.empty() && may_run(stream.front())) {
        auto& first = stream.front();
        if (first.moment->begin_us < 0) first.moment->begin_us = now_us_;
        if (first.time_left + first.sending_left > kNothing) break;
        first.moment->is_done = true;
        first.moment->end_us = now_us_;
        if (first.is_collective) queues_[first.queue].pop_front();
        stream.pop_front();
        has_ended = true;
      }
}

/// To the next end of something; false if nothing is under way.
bool SimulatedStreams::go_on() {
  std::vector<Operation*> under_way;
  for (auto& stream : streams_)
    if (!stream.empty() && may_run(stream.front())) under_way.push_back(&stream.front());
  if (under_way.empty()) return false;
  const auto sharers = static_cast<double>(
      std::ranges::count_if(under_way, [](const auto* operation) { return operation->time_left <= kNothing; }));
  double step = std::numeric_limits<double>::infinity();
  for (const auto* one : under_way)
    step = std::min(step, one->time_left > kNothing ? one->time_left : one->sending_left * sharers);
  for (auto* one : under_way) {
    if (one->time_left > kNothing)
      one->time_left -= step;
    else
      one->sending_left -= step / sharers;
  }
  now_us_ += step;
  end_what_is_done();
  return true;
}

}  // namespace fsdp::bench
