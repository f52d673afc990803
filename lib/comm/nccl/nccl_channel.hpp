// Only in builds with CUDA.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/nccl/comm_streams.hpp"
#include "comm/nccl/nccl_link.hpp"
#include "comm/work.hpp"

namespace fsdp {

/// One launch.
struct NcclFlight {
  CollectiveInfo info;
  std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
  std::vector<at::Tensor> tensors = {};         ///< guarded by the channel
  std::shared_ptr<StreamEvent> done = nullptr;  ///< set once, by the channel; null: not on its stream yet
  bool is_captured = false;                     ///< it runs when its graph does
};

/// One NCCL communicator, its stream, and what is under way on it, in the order of launches.
///
/// begin, note_launched, link: as NcclLink says. The others: any thread.
class NcclChannel {
 public:
  NcclChannel(const char* name, const NcclApi& api, StreamHandle stream, int cta_policy)
      : name_(name), link_(api, cta_policy), stream_(stream) {}

  const char* name() const { return name_; }
  NcclLink& link() { return link_; }
  StreamHandle stream() const { return stream_; }

  /// `flight` is about to be launched; it keeps `tensors` until it is waited for, or done. One that is captured is not
  /// watched: the graph's memory stays its own.
  void begin(const std::shared_ptr<NcclFlight>& flight, std::vector<at::Tensor> tensors);
  /// Notes that `flight` is on the stream, in front of `done`.
  void note_launched(NcclFlight& flight, std::shared_ptr<StreamEvent> done);
  /// Lets go of the flight's tensors, whose memory only streams that wait for the flight use from now on.
  void let_go(NcclFlight& flight);

  /// Adds the tensors of what is done to `unused`, to be let go of without locks. Throws what the device reports.
  void settle(std::vector<at::Tensor>& unused);
  /// Returns the oldest flight; null: nothing is under way.
  std::shared_ptr<NcclFlight> oldest() const;
  /// True if all that was launched is done. Throws what the device reports.
  bool is_quiet() const;
  /// Nothing is launched any more. Waits until `end` at most for what is under way; what is not done by then keeps its
  /// tensors for ever. Returns how many collectives that are.
  size_t finish(std::chrono::steady_clock::time_point end);

 private:
  using Flights = std::deque<std::shared_ptr<NcclFlight>>;
  void settle_locked(std::vector<at::Tensor>& unused);

  const char* const name_;
  NcclLink link_;
  const StreamHandle stream_;
  mutable std::mutex mutex_;  // of the flights
  Flights flights_;           // in their order on the stream
};

}  // namespace fsdp
