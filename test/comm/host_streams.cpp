#include "host_streams.hpp"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <random>
#include <stdexcept>
#include <thread>

namespace fsdp::test {

struct HostStreams::Capture {
  std::atomic<bool> is_on{false};
  std::atomic<int> asked{0};
  std::mutex mutex;
  std::shared_ptr<const int> graph;  // the last one, while it lives
  std::vector<std::shared_ptr<const int>> graphs;
};

class HostStream {
 public:
  HostStream(uint64_t seed, std::chrono::microseconds max_delay, std::shared_ptr<HostStreams::Capture> capture)
      : capture(std::move(capture)), random_(seed), max_delay_(max_delay), thread_([this] { run(); }) {}

  const std::shared_ptr<HostStreams::Capture> capture;

  ~HostStream() {
    {
      std::lock_guard lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void enqueue(std::function<void()> operation) {
    HostStreams::Sink sink;
    {
      std::lock_guard lock(mutex_);
      sink = sink_;
      if (!sink) operations_.push_back(std::move(operation));
    }
    if (sink) return sink(std::move(operation));
    changed_.notify_all();
  }

  void divert(HostStreams::Sink sink, std::shared_ptr<const void> graph) {
    std::lock_guard lock(mutex_);
    sink_ = std::move(sink);
    graph_ = std::move(graph);
  }
  bool is_diverted() {
    std::lock_guard lock(mutex_);
    return sink_ != nullptr;
  }
  /// Null: nothing that is queued goes into one.
  std::shared_ptr<const void> graph() {
    std::lock_guard lock(mutex_);
    return graph_;
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return ends_ || !operations_.empty(); });
      if (operations_.empty()) return;
      auto operation = std::move(operations_.front());
      operations_.pop_front();
      lock.unlock();
      if (max_delay_.count() > 0 && random_() % 2 == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(random_() % (max_delay_.count() + 1)));
      operation();
      operation = nullptr;
      lock.lock();
    }
  }

  std::mt19937_64 random_;
  const std::chrono::microseconds max_delay_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> operations_;
  HostStreams::Sink sink_;
  std::shared_ptr<const void> graph_;  // the sink's
  bool ends_ = false;
  std::thread thread_;
};

namespace {

thread_local StreamHandle current_stream = nullptr;

HostStream* host_stream(StreamHandle handle) { return reinterpret_cast<HostStream*>(handle); }

/// What an event and the operation that sets it share.
struct Mark {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_set = false;

  void set() {
    std::lock_guard lock(mutex);
    is_set = true;
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return is_set; });
  }
};

class HostEvent final : public StreamEvent {
 public:
  explicit HostEvent(std::shared_ptr<std::atomic<int>> asked) : asked_(std::move(asked)) {}
  bool is_done() const override {
    if (asked_ != nullptr) ++*asked_;
    std::lock_guard lock(mark->mutex);
    return mark->is_set;
  }
  const std::shared_ptr<Mark> mark = std::make_shared<Mark>();

 private:
  std::shared_ptr<std::atomic<int>> asked_;  // counts the questions; null where they are welcome
};

}  // namespace

HostStreams::HostStreams() : HostStreams(Options()) {}
HostStreams::HostStreams(Options options) : options_(options), capture_(std::make_shared<Capture>()) {}
HostStreams::~HostStreams() = default;

StreamHandle HostStreams::make_stream(StreamPriority /*priority*/) {
  std::lock_guard lock(mutex_);
  const uint64_t seed = options_.seed * 1000003 + streams_.size();
  auto max_delay = options_.max_delay;
  if (options_.has_own_paces) max_delay *= std::mt19937_64(~seed)() % 4;
  streams_.push_back(std::make_unique<HostStream>(seed, max_delay, capture_));
  return reinterpret_cast<StreamHandle>(streams_.back().get());
}

StreamHandle HostStreams::current() { return current_stream; }

std::shared_ptr<StreamEvent> HostStreams::record(StreamHandle stream) {
  auto event = std::make_shared<HostEvent>(
      capture_->is_on ? std::shared_ptr<std::atomic<int>>(capture_, &capture_->asked) : nullptr);
  if (stream == nullptr)
    event->mark->set();
  else
    enqueue(stream, [mark = event->mark] { mark->set(); });
  return event;
}

bool HostStreams::is_forgotten(StreamHandle stream, const StreamEvent& event) {
  const std::pair<StreamHandle, std::shared_ptr<const void>> wait(stream, static_cast<const HostEvent&>(event).mark);
  std::lock_guard lock(mutex_);
  if (wait != last_wait_) ++waits_;
  last_wait_ = wait;
  return options_.forgets_waits || waits_ == options_.forgets_wait;
}

int HostStreams::waits() const {
  std::lock_guard lock(mutex_);
  return waits_;
}

void HostStreams::wait(StreamHandle stream, const StreamEvent& event) {
  if (is_forgotten(stream, event)) return;
  const auto mark = static_cast<const HostEvent&>(event).mark;
  if (stream == nullptr)
    mark->wait();
  else
    enqueue(stream, [mark] { mark->wait(); });
}

bool HostStreams::is_capturing(StreamHandle /*stream*/) { return capture_->is_on; }
void HostStreams::set_capturing(bool is_capturing) {
  std::lock_guard lock(capture_->mutex);
  if (is_capturing) capture_->graphs.push_back(capture_->graph = std::make_shared<const int>(0));
  capture_->is_on = is_capturing;
}

void HostStreams::drop_graphs() {
  std::lock_guard lock(capture_->mutex);
  capture_->graph.reset();
  capture_->graphs.clear();
}

std::shared_ptr<const void> HostStreams::captured_graph(StreamHandle stream) {
  if (stream == nullptr) return nullptr;
  if (auto graph = host_stream(stream)->graph()) return graph;
  auto& capture = *host_stream(stream)->capture;
  std::lock_guard lock(capture.mutex);
  return capture.is_on ? capture.graph : nullptr;
}

c10::Device HostStreams::device() const {
  if (options_.has_lost_device && *options_.has_lost_device) throw std::runtime_error("CUDA error: no such device any more");
  return c10::Device(c10::DeviceType::CPU);
}
int HostStreams::captured_events_asked() const { return capture_->asked; }

void HostStreams::enqueue(StreamHandle stream, std::function<void()> operation) {
  host_stream(stream)->enqueue(std::move(operation));
}

void HostStreams::divert(StreamHandle stream, Sink sink, std::shared_ptr<const void> graph) {
  host_stream(stream)->divert(std::move(sink), std::move(graph));
}
bool HostStreams::is_diverted(StreamHandle stream) { return host_stream(stream)->is_diverted(); }

void HostStreams::synchronize(StreamHandle stream) {
  const auto mark = std::make_shared<Mark>();
  enqueue(stream, [mark] { mark->set(); });
  mark->wait();
}

void HostStreams::synchronize(const StreamEvent& event) { static_cast<const HostEvent&>(event).mark->wait(); }

HostStreams::Current::Current(StreamHandle stream) : before_(current_stream) { current_stream = stream; }
HostStreams::Current::~Current() { current_stream = before_; }

}  // namespace fsdp::test
