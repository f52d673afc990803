#include "late_streams.hpp"

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#include "late_allocator.hpp"

namespace fsdp::test {
namespace {

constexpr size_t kPool = 32;

std::array<std::shared_ptr<LateStreams>, kLateDevices> devices;
std::array<std::atomic<int>, kLateDevices> waits;
std::array<std::atomic<int>, kLateDevices> losses, recorded;

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kLateDevices> current_ids{};

}  // namespace

c10::Device late(int index) { return {kLate, static_cast<c10::DeviceIndex>(index)}; }
bool is_late(c10::Device device) { return device.type() == kLate; }

LateDevices::LateDevices(HostStreams::Options options) {
  if (devices[0] != nullptr) throw std::logic_error("there are late devices already");
  for (int i = 0; i < kLateDevices; ++i) {
    auto own = options;
    own.seed = options.seed * kLateDevices + i;
    devices[i] = std::make_shared<LateStreams>(i, own);
  }
}

LateDevices::~LateDevices() {
  for (const auto& streams : devices) streams->synchronize_all();
  forget_late_memory();
  for (auto& streams : devices) streams.reset();
}

std::shared_ptr<HostStreams> LateDevices::streams(int index) { return devices.at(index); }

LostDevice::LostDevice(int index) : index_(index) { ++losses.at(index); }
LostDevice::~LostDevice() { --losses.at(index_); }
bool is_lost(int index) { return losses.at(index) > 0; }

int streams_recorded(int index) { return recorded.at(index); }
void note_recorded(c10::DeviceIndex index) { ++recorded.at(static_cast<size_t>(index)); }

int host_waits(int index) { return waits.at(index); }

LateStreams::LateStreams(int index, Options options) : HostStreams(options), index_(index) {
  by_id_.push_back(make_stream(StreamPriority::kNormal));
}

StreamHandle LateStreams::current() { return handle(current_ids[index_]); }

c10::Stream LateStreams::next_of_pool() {
  {
    std::lock_guard lock(mutex_);
    if (pool_.size() == kPool) return stream(pool_[handed_out_++ % kPool]);
  }
  const auto made = new_stream();
  std::lock_guard lock(mutex_);
  pool_.push_back(made.id());
  return made;
}

c10::Stream LateStreams::new_stream() {
  const auto handle = make_stream(StreamPriority::kNormal);
  std::lock_guard lock(mutex_);
  by_id_.push_back(handle);
  return stream(static_cast<c10::StreamId>(by_id_.size() - 1));
}

StreamHandle LateStreams::handle(c10::StreamId id) const {
  std::lock_guard lock(mutex_);
  return by_id_.at(static_cast<size_t>(id));
}

void LateStreams::synchronize_all() {
  std::vector<StreamHandle> all;
  {
    std::lock_guard lock(mutex_);
    all = by_id_;
  }
  for (const auto stream : all) synchronize(stream);
}

LateStreams& late_streams(c10::DeviceIndex index) {
  const auto& streams = devices.at(static_cast<size_t>(index));
  if (streams == nullptr) throw std::logic_error("there are no late devices; make a LateDevices");
  return *streams;
}

StreamHandle handle_of(c10::Stream stream) { return late_streams(stream.device_index()).handle(stream.id()); }

c10::DeviceIndex current_late_device() { return current_device; }
void set_current_late_device(c10::DeviceIndex index) noexcept { current_device = index; }

c10::Stream current_late_stream(c10::DeviceIndex index) {
  return c10::Stream(c10::Stream::UNSAFE, late(index), current_ids.at(static_cast<size_t>(index)));
}

void set_current_late_stream(c10::Stream stream) {
  current_ids.at(static_cast<size_t>(stream.device_index())) = stream.id();
}

void enqueue_late(c10::DeviceIndex index, std::string name, std::function<void()> operation) {
  auto& streams = late_streams(index);
  HostStreams::enqueue(streams.current(), [name = std::move(name), operation = std::move(operation)] {
    try {
      operation();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "late device: %s failed on its stream: %s\n", name.c_str(), error.what());
      std::abort();
    }
  });
}

void note_host_wait(c10::DeviceIndex index, StreamHandle stream, const char* what) {
  late_streams(index).refuse_in_capture(stream, what);
  ++waits.at(static_cast<size_t>(index));
}

void wait_for_late(c10::DeviceIndex index) {
  const auto stream = late_streams(index).current();
  note_host_wait(index, stream, "a read by the host");
  HostStreams::synchronize(stream);
}

}  // namespace fsdp::test
