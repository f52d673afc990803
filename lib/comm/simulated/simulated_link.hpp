#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "fsdp/simulated_clock.hpp"

namespace fsdp {

/// What the queues of several communicators share: transfers of one queue follow each other, those of several
/// go on at once and share the bandwidth equally. When a transfer will be done depends on what is
/// started later, so it is known only when the clock has come to it.
///
/// One thread starts and waits; any may ask.
class SimulatedLink {
 public:
  struct Transfer {
    double latency_ns = 0;  ///< passes first, and takes nobody's bandwidth
    double sending_ns = 0;  ///< alone on the link; twice that where two share it
    bool is_done = false;
    int64_t begin_ns = 0, end_ns = 0;  ///< when it was first in its queue and held by none; when it was done
  };

  explicit SimulatedLink(std::shared_ptr<SimulatedClock> clock);

  /// Adds a queue for one communicator, and returns its number.
  size_t add_queue();
  /// Starts a transfer in a queue. behind: another one of this link, which is done before this one begins; so do those behind
  /// it in its queue. Null: none.
  std::shared_ptr<Transfer> start(size_t queue, double latency_ns, double sending_ns,
                                  std::shared_ptr<const Transfer> behind = nullptr);
  /// Lets the clock come to its end.
  void wait(const Transfer& transfer);
  bool is_done(const Transfer& transfer);

 private:
  struct Queued {
    std::shared_ptr<Transfer> transfer;
    double latency_left = 0, sending_left = 0;
    std::shared_ptr<const Transfer> behind;
    bool is_held() const { return behind && !behind->is_done; }
    bool sends() const { return !is_held() && latency_left <= 0; }
  };
  void follow_clock();
  bool go_on(double until);
  double sending() const;
  double next_event() const;
  void pass(double time);
  void end(std::deque<Queued>& queue);

  std::mutex mutex_;
  std::shared_ptr<SimulatedClock> clock_;
  std::vector<std::deque<Queued>> queues_;
  double now_ = 0;  // how far the transfers have been followed
};

}  // namespace fsdp
