#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/nccl/comm_streams.hpp"

namespace fsdp::test {

class HostStream;

/// One rank's streams as threads of the host: each runs its operations in order, and some of them late, so that a wait
/// that is missing shows as a wrong result. A thread without a stream of its own (see Current) is one itself: what
/// it does is done, and where its stream is to wait, it does.
class HostStreams : public CommStreams {
 public:
  struct Capture;
  struct Options {
    uint64_t seed = 1;
    /// Every other operation or so starts late, by up to this.
    std::chrono::microseconds max_delay{0};
    /// Some streams are late by more than this, some never, as the seed has it: one gets far ahead of another.
    bool has_own_paces = false;
    /// As if somebody had forgotten to let streams wait: to see that a test would notice.
    bool forgets_waits = false;
    /// The same of one wait alone, by its number (see `waits`).
    std::optional<int> forgets_wait = {};
    /// Once it is set, whoever asks for the device gets an exception, as of one that has fallen off its bus.
    std::shared_ptr<std::atomic<bool>> has_lost_device = {};
  };

  HostStreams();
  explicit HostStreams(Options options);
  /// Returns when all that is queued has run.
  ~HostStreams() override;

  c10::Device device() const override;
  StreamHandle make_stream(StreamPriority priority) override;
  StreamHandle current() override;
  std::shared_ptr<StreamEvent> record(StreamHandle stream) override;
  void wait(StreamHandle stream, const StreamEvent& event) override;
  bool is_capturing(StreamHandle stream) override;
  /// How often a stream has been told to wait; the same for the same event again counts once.
  int waits() const;

  /// From now on what is recorded must not be asked whether it is done. What is launched meanwhile is a graph's, too.
  void set_capturing(bool is_capturing);
  /// Destroys the graphs that were captured so far.
  void drop_graphs();
  /// The graph that is being captured on a stream of HostStreams; null: none.
  static std::shared_ptr<const void> captured_graph(StreamHandle stream);
  /// How often one was asked all the same.
  int captured_events_asked() const;

  static void enqueue(StreamHandle stream, std::function<void()> operation);
  /// What is queued on `stream` from now on goes to `sink` instead: into `graph`. Null: to the stream again.
  using Sink = std::function<void(std::function<void()> operation)>;
  static void divert(StreamHandle stream, Sink sink, std::shared_ptr<const void> graph = nullptr);
  static bool is_diverted(StreamHandle stream);
  /// The host waits.
  static void synchronize(StreamHandle stream);
  static void synchronize(const StreamEvent& event);

  /// Makes a stream the calling thread's current one while it lives.
  class Current {
   public:
    explicit Current(StreamHandle stream);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    StreamHandle before_;
  };

 private:
  bool is_forgotten(StreamHandle stream, const StreamEvent& event);

  Options options_;
  std::shared_ptr<Capture> capture_;
  mutable std::mutex mutex_;
  int waits_ = 0;
  std::pair<StreamHandle, std::shared_ptr<const void>> last_wait_;
  std::vector<std::unique_ptr<HostStream>> streams_;
};

}  // namespace fsdp::test
