#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace fsdp::bench {

/// What a stream has done at some point of its order. Times in microseconds.
struct SimulatedMoment {
  bool is_done = false;
  double begin_us = -1, end_us = -1;  ///< -1: not yet
};

/// Something that took time, as it went.
struct SimulatedSlice {
  std::string name;
  double bytes = 0;     ///< of a collective's full buffer
  double alone_us = 0;  ///< what it takes with the link to itself
  double launched_us = 0;
  std::shared_ptr<const SimulatedMoment> moment;
};

/// The streams of a device that exists only in time, and the link that its collectives go over. The host queues
/// operations, which takes no time; time passes when the host waits, and to no later moment than what it waits for.
/// What a stream runs follows what is before it there.
///
/// Collectives of one queue of the link go in the order of their launch, as those of one NCCL communicator do whatever
/// their streams; those of several queues go on at once and share the bandwidth equally. Thread-safe.
class SimulatedStreams {
 public:
  using Moment = std::shared_ptr<SimulatedMoment>;

  size_t add_stream();
  size_t add_queue();

  void compute(size_t stream, double us, std::string name);
  /// Returns its end. latency_us passes first, and takes nobody's bandwidth; sending_us: alone on the link.
  Moment collective(size_t stream, size_t queue, double latency_us, double sending_us, double bytes, std::string name);
  /// The moment when all that `stream` has been given until now is done.
  Moment record(size_t stream);
  void wait(size_t stream, Moment moment);
  /// Whether it is, now.
  bool is_done(const SimulatedMoment& moment);

  /// The host waits.
  void synchronize(const SimulatedMoment& moment);
  void synchronize_all();

  double now_us() const;
  /// What has taken time since the last call.
  std::vector<SimulatedSlice> take_slices();

 private:
  struct Operation {
    Moment moment = {};  // its own
    std::shared_ptr<const SimulatedMoment> after = {};
    bool is_collective = false;
    size_t queue = 0;
    double time_left = 0, sending_left = 0;  // one, then the other
  };
  Moment add(size_t stream, Operation operation);
  bool may_run(const Operation& operation) const;
  void end_what_is_done();
  bool go_on();

  mutable std::mutex mutex_;
  double now_us_ = 0;
  std::vector<std::deque<Operation>> streams_;
  std::vector<std::deque<Moment>> queues_;  // of collectives that have not ended, in the order of their launch
  std::vector<SimulatedSlice> slices_;
};

}  // namespace fsdp::bench
