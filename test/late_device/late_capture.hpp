#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "late_streams.hpp"

namespace fsdp::test {

class LateCapture;

/// A point in a stream that writes into a graph: streams may wait for it, nobody may ask it.
class CapturedEvent final : public StreamEvent, public std::enable_shared_from_this<CapturedEvent> {
 public:
  using Reached = std::map<StreamHandle, size_t>;  // how far of each stream this is behind

  CapturedEvent(std::weak_ptr<LateCapture> capture, Reached reached)
      : capture_(std::move(capture)), reached_(std::move(reached)) {}
  bool is_done() const override;
  /// Null: its capture is over.
  std::shared_ptr<LateCapture> capture() const { return capture_.lock(); }
  const Reached& reached() const { return reached_; }

 private:
  const std::weak_ptr<LateCapture> capture_;
  const Reached reached_;
};

/// What streams of one device write into one graph, from the beginning of the capture to its end. Thread-safe.
class LateCapture : public std::enable_shared_from_this<LateCapture> {
 public:
  /// In the order of the host's calls.
  struct Entry {
    StreamHandle stream = nullptr;
    std::function<void()> operation = {};                 // or
    std::shared_ptr<const CapturedEvent> recorded = {};   // or
    std::shared_ptr<const CapturedEvent> waited_for = {};
  };

  LateCapture(LateStreams& streams, StreamHandle origin, LateGraphId graph);
  void begin();

  int pool() const { return graph_.pool; }
  bool is_of_this_thread() const { return thread_ == std::this_thread::get_id(); }
  bool has(StreamHandle stream) const;
  std::shared_ptr<StreamEvent> record(StreamHandle stream);
  /// A stream that is not in it joins it.
  void wait(StreamHandle stream, std::shared_ptr<const CapturedEvent> event);
  /// Nothing of it may be run: `why`, which is thrown.
  [[noreturn]] void spoil(const std::string& why);

  /// Its streams run again what they are given.
  void let_go();
  /// Throws why no graph may be made of it. After `let_go`.
  std::vector<Entry> take();

 private:
  void add(StreamHandle stream);
  void write(StreamHandle stream, std::function<void()> operation);

  LateStreams& streams_;
  const StreamHandle origin_;
  const LateGraphId graph_;
  const std::thread::id thread_ = std::this_thread::get_id();
  mutable std::mutex mutex_;
  std::string spoilt_;
  std::vector<Entry> entries_;
  std::map<StreamHandle, CapturedEvent::Reached> reached_;  // by stream, the stream itself among what it has reached
};

/// What a CUDA graph is on a GPU: operations that streams of one device have been given, to be run again and again as they
/// depend on each other. As strict: see the errors in late_capture.cpp. Memory that is allocated meanwhile is of a pool of
/// its own, as long as the graph lives.
class LateGraph {
 public:
  LateGraph();
  ~LateGraph();
  LateGraph(const LateGraph&) = delete;
  LateGraph& operator=(const LateGraph&) = delete;

  /// Once. What `body` queues on the current stream of the current device, and on streams that wait for it, is written down.
  /// Throws what it does, and what a GPU would refuse.
  void capture(const std::function<void()>& body);
  /// On the current stream, once for each call.
  void replay();

 private:
  const LateGraphId id_;
  c10::DeviceIndex device_ = -1;  // none: nothing has been captured
  std::vector<LateCapture::Entry> entries_;
  std::map<StreamHandle, StreamHandle> lanes_;  // a stream of its own for each that was captured
};

}  // namespace fsdp::test
