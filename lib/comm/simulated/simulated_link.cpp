#include "comm/simulated/simulated_link.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fsdp {

namespace {
/// Less than this is nothing: sums of shares of a nanosecond are not exact.
constexpr double kNothing = 1e-3;
}  // namespace

SimulatedLink::SimulatedLink(std::shared_ptr<SimulatedClock> clock) : clock_(std::move(clock)) {}

size_t SimulatedLink::add_queue() {
  std::lock_guard lock(mutex_);
  queues_.emplace_back();
  return queues_.size() - 1;
}

std::shared_ptr<SimulatedLink::Transfer> SimulatedLink::start(size_t queue, double latency_ns, double sending_ns,
                                                             std::shared_ptr<const Transfer> behind) {
  std::lock_guard lock(mutex_);
  follow_clock();
  auto transfer = std::make_shared<Transfer>(Transfer{.latency_ns = latency_ns, .sending_ns = sending_ns});
  transfer->begin_ns = std::llround(now_);
  queues_[queue].push_back({transfer, latency_ns, sending_ns, std::move(behind)});
  return transfer;
}

void SimulatedLink::wait(const Transfer& transfer) {
  {
    // Who waits starts nothing meanwhile, so what comes until then is known now.
    std::lock_guard lock(mutex_);
    follow_clock();
    while (!transfer.is_done && go_on(std::numeric_limits<double>::infinity())) {
    }
  }
  clock_->wait_until(transfer.end_ns);
}

bool SimulatedLink::is_done(const Transfer& transfer) {
  std::lock_guard lock(mutex_);
  follow_clock();
  return transfer.is_done && clock_->now_ns() >= transfer.end_ns;
}

void SimulatedLink::follow_clock() {
  const auto clock = static_cast<double>(clock_->now_ns());
  while (now_ < clock && go_on(clock)) {
  }
  now_ = std::max(now_, clock);
}

/// Goes on to the next event, at most to `until`; false if nothing is under way.
bool SimulatedLink::go_on(double until) {
  const double step = next_event();
  if (std::isinf(step)) return false;
  pass(std::min(step, until - now_));
  return true;
}

/// Queues that send now and share the link.
double SimulatedLink::sending() const {
  return static_cast<double>(std::count_if(queues_.begin(), queues_.end(), [](const auto& queue) {
    return !queue.empty() && queue.front().sends();
  }));
}

/// How long until the first of the queues' first transfers begins to send, or is done.
double SimulatedLink::next_event() const {
  const double sharers = sending();
  double next = std::numeric_limits<double>::infinity();
  for (const auto& queue : queues_) {
    if (queue.empty() || queue.front().is_held()) continue;
    const auto& first = queue.front();
    next = std::min(next, first.latency_left > 0 ? first.latency_left
                                                 : first.sending_left * sharers);
  }
  return next;
}

void SimulatedLink::pass(double time) {
  const double sharers = sending();
  now_ += time;
  for (auto& queue : queues_) {
    if (queue.empty() || queue.front().is_held()) continue;
    auto& first = queue.front();
    if (first.latency_left > 0) {
      first.latency_left -= time;
      if (first.latency_left < kNothing) first.latency_left = 0;
    } else {
      first.sending_left -= time / sharers;
    }
  }
  // Only now, as the end of one lets another begin that has not had this time.
  for (auto& queue : queues_)
    if (!queue.empty() && queue.front().sends() && queue.front().sending_left <= kNothing) end(queue);
}

/// Ends the first transfer of the queue.
void SimulatedLink::end(std::deque<Queued>& queue) {
  const auto transfer = std::move(queue.front().transfer);
  transfer->is_done = true;
  transfer->end_ns = std::llround(now_);
  queue.pop_front();
  if (!queue.empty()) queue.front().transfer->begin_ns = std::llround(now_);
  for (auto& other : queues_)
    if (!other.empty() && other.front().behind == transfer) other.front().transfer->begin_ns = std::llround(now_);
}

}  // namespace fsdp
