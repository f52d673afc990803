#include "late_capture.hpp"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>

#include "late_allocator.hpp"

namespace fsdp::test {
namespace {

std::atomic<int> pools{0};

// As CUDA words them.
constexpr auto kCapturedEvent = "operation not permitted on an event last recorded in a capturing stream";
constexpr auto kDefaultStream = "operation would make the default stream depend on a capturing stream";
constexpr auto kIsolation = "dependency created on uncaptured work in another stream";
constexpr auto kMerge = "operation would result in a merge of separate capture sequences";

}  // namespace

bool CapturedEvent::is_done() const {
  if (const auto mine = capture()) mine->spoil(kCapturedEvent);
  TORCH_CHECK(false, "late device: ", kCapturedEvent);
}

LateCapture::LateCapture(LateStreams& streams, StreamHandle origin, LateGraphId graph)
    : streams_(streams), origin_(origin), graph_(std::move(graph)) {}

void LateCapture::begin() {
  TORCH_CHECK(!streams_.is_default(origin_), "late device: operation not permitted when the default stream is captured");
  std::lock_guard lock(mutex_);
  add(origin_);
}

bool LateCapture::has(StreamHandle stream) const {
  std::lock_guard lock(mutex_);
  return reached_.contains(stream);
}

void LateCapture::add(StreamHandle stream) {
  reached_[stream][stream] = 0;
  HostStreams::divert(stream, [weak = weak_from_this(), stream](std::function<void()> operation) {
    if (const auto self = weak.lock()) self->write(stream, std::move(operation));
  }, graph_.life);
}

void LateCapture::write(StreamHandle stream, std::function<void()> operation) {
  std::lock_guard lock(mutex_);
  ++reached_[stream][stream];
  entries_.push_back({.stream = stream, .operation = std::move(operation)});
}

std::shared_ptr<StreamEvent> LateCapture::record(StreamHandle stream) {
  std::lock_guard lock(mutex_);
  auto event = std::make_shared<CapturedEvent>(weak_from_this(), reached_.at(stream));
  entries_.push_back({.stream = stream, .recorded = event});
  return event;
}

void LateCapture::wait(StreamHandle stream, std::shared_ptr<const CapturedEvent> event) {
  if (streams_.is_default(stream)) spoil(kDefaultStream);
  std::lock_guard lock(mutex_);
  if (!reached_.contains(stream)) add(stream);
  auto& reached = reached_[stream];
  for (const auto& [other, how_far] : event->reached()) reached[other] = std::max(reached[other], how_far);
  ++reached[stream];  // a fork that nobody joins is one, whether or not more is queued there
  entries_.push_back({.stream = stream, .waited_for = std::move(event)});
}

void LateCapture::spoil(const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    if (spoilt_.empty()) spoilt_ = why;
  }
  TORCH_CHECK(false, "late device: ", why);
}

void LateCapture::let_go() {
  std::lock_guard lock(mutex_);
  for (const auto& [stream, reached] : reached_) HostStreams::divert(stream, nullptr);
}

std::vector<LateCapture::Entry> LateCapture::take() {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(spoilt_.empty(), "late device: the capture was invalidated by an earlier error: ", spoilt_);
  auto& joined = reached_.at(origin_);
  const auto unjoined = std::ranges::count_if(
      reached_, [&](const auto& other) { return joined[other.first] < other.second.at(other.first); });
  TORCH_CHECK(unjoined == 0, "late device: capturing stream has unjoined work: ", unjoined, " of ", reached_.size(),
              " streams were not joined to the one that the capture began on");
  return std::move(entries_);
}

// --- streams that may be captured

std::shared_ptr<LateCapture> LateStreams::capture_of(StreamHandle stream) const {
  std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(captures_, [&](const auto& capture) { return capture->has(stream); });
  return found == captures_.end() ? nullptr : *found;
}

std::shared_ptr<LateCapture> LateStreams::begin_capture(LateGraphId graph) {
  const auto origin = current();
  TORCH_CHECK(capture_of(origin) == nullptr, "late device: operation not permitted when stream is capturing");
  auto capture = std::make_shared<LateCapture>(*this, origin, std::move(graph));
  capture->begin();
  std::lock_guard lock(mutex_);
  captures_.push_back(capture);
  return capture;
}

void LateStreams::end_capture(const std::shared_ptr<LateCapture>& capture) {
  capture->let_go();
  std::lock_guard lock(mutex_);
  std::erase(captures_, capture);
}

bool LateStreams::is_capturing() const {
  std::lock_guard lock(mutex_);
  return !captures_.empty();
}

std::shared_ptr<StreamEvent> LateStreams::record(StreamHandle stream) {
  const auto capture = capture_of(stream);
  return capture ? capture->record(stream) : HostStreams::record(stream);
}

void LateStreams::wait(StreamHandle stream, const StreamEvent& event) {
  const auto* captured = dynamic_cast<const CapturedEvent*>(&event);
  const auto capture = capture_of(stream);
  if (captured == nullptr) {
    if (capture) capture->spoil(kIsolation);
    return HostStreams::wait(stream, event);
  }
  const auto theirs = captured->capture();
  if (capture && capture != theirs) capture->spoil(theirs ? kMerge : kIsolation);
  TORCH_CHECK(theirs != nullptr, "late device: ", kCapturedEvent);
  theirs->wait(stream, captured->shared_from_this());
}

void LateStreams::refuse_in_capture(StreamHandle stream, const char* what) const {
  const auto refuse = [&](LateCapture& capture) {
    capture.spoil(std::string(what) + ": operation not permitted when stream is capturing");
  };
  if (const auto capture = stream == nullptr ? nullptr : capture_of(stream)) refuse(*capture);
  std::vector<std::shared_ptr<LateCapture>> captures;
  {
    std::lock_guard lock(mutex_);
    captures = captures_;
  }
  for (const auto& capture : captures)
    if (capture->is_of_this_thread()) refuse(*capture);
}

// --- graphs

LateGraph::LateGraph() : id_{.pool = ++pools, .life = std::make_shared<const int>(0)} { open_late_pool(id_.pool); }

LateGraph::~LateGraph() {
  if (device_ >= 0) late_streams(device_).synchronize_all();  // what it is about to give back is in use until then
  close_late_pool(id_.pool);
}

void LateGraph::capture(const std::function<void()>& body) {
  TORCH_CHECK(device_ < 0, "late device: this graph has been captured already");
  const auto index = current_late_device();
  auto& streams = late_streams(index);
  auto capture = streams.begin_capture(id_);
  try {
    body();
  } catch (...) {
    streams.end_capture(capture);
    throw;
  }
  streams.end_capture(capture);
  entries_ = capture->take();
  device_ = index;
  for (const auto& entry : entries_)
    if (!lanes_.contains(entry.stream)) lanes_[entry.stream] = streams.make_stream(StreamPriority::kNormal);
}

void LateGraph::replay() {
  TORCH_CHECK(device_ >= 0, "late device: this graph has not been captured");
  auto& streams = late_streams(device_);
  const auto launched_on = streams.current();
  streams.refuse_in_capture(launched_on, "a replay");
  const auto begin = streams.record(launched_on);
  for (const auto& [stream, lane] : lanes_) streams.wait(lane, *begin);
  std::map<const CapturedEvent*, std::shared_ptr<StreamEvent>> events;  // of this replay
  for (const auto& entry : entries_) {
    const auto lane = lanes_.at(entry.stream);
    if (entry.operation)
      HostStreams::enqueue(lane, entry.operation);
    else if (entry.recorded)
      events[entry.recorded.get()] = streams.record(lane);
    else
      streams.wait(lane, *events.at(entry.waited_for.get()));
  }
  for (const auto& [stream, lane] : lanes_) streams.wait(launched_on, *streams.record(lane));
}

}  // namespace fsdp::test
