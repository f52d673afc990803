#include "extension/simulated_device/simulated_device.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <stdexcept>

#include "extension/simulated_device/simulated_memory.hpp"

namespace fsdp::bench {
namespace {

const c10::Device kDevice(kSimulated, 0);

c10::Stream stream_of(size_t number) {
  return c10::Stream(c10::Stream::UNSAFE, kDevice, static_cast<c10::StreamId>(number));
}

/// The first one is the default stream.
thread_local size_t current_number = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSimulated; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device /*device*/) const override { return kDevice; }
  void setDevice(c10::Device /*device*/) const override {}
  void uncheckedSetDevice(c10::Device /*device*/) const noexcept override {}

  c10::Stream getStream(c10::Device /*device*/) const override { return stream_of(current_number); }
  c10::Stream getDefaultStream(c10::Device /*device*/) const override { return stream_of(0); }
  // A pool would hand one stream to two users, whose operations then wait for each other.
  c10::Stream getStreamFromGlobalPool(c10::Device /*device*/, bool /*isHighPriority*/) const override {
    return stream_of(simulated_streams().add_stream());
  }
  c10::Stream getNewStream(c10::Device /*device*/, int /*priority*/) const override {
    return stream_of(simulated_streams().add_stream());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(current_number, number_of(stream)));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return simulated_streams().is_done(*simulated_streams().record(number_of(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    simulated_streams().synchronize(*simulated_streams().record(number_of(stream)));
  }
  void synchronizeDevice(c10::DeviceIndex /*index*/) const override { simulated_streams().synchronize_all(); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*index*/,
              c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new SimulatedStreams::Moment;
    moment_of(*event) = simulated_streams().record(number_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) simulated_streams().wait(number_of(stream), moment_of(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || simulated_streams().is_done(*moment_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) simulated_streams().synchronize(*moment_of(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex /*index*/) const noexcept override {
    delete static_cast<SimulatedStreams::Moment*>(event);
  }

 private:
  static SimulatedStreams::Moment& moment_of(void* event) { return *static_cast<SimulatedStreams::Moment*>(event); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  // Autograd lets streams wait for each other only where this says yes.
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex /*index*/) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex /*index*/) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex /*index*/) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex /*index*/) const override {
    static const auto generator = at::make_generator<at::CPUGeneratorImpl>();
    return generator;
  }
  at::Device getDeviceFromPtr(void* /*memory*/) const override { return kDevice; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_simulated(*storage.unsafeGetStorageImpl(), bytes);
  }
};

}  // namespace

SimulatedStreams& simulated_streams() {
  // Never destroyed: streams of static objects may outlive it.
  static auto* streams = [] {
    auto* made = new SimulatedStreams;
    made->add_stream();
    return made;
  }();
  return *streams;
}

c10::Stream current_simulated_stream() { return stream_of(current_number); }
size_t number_of(const c10::Stream& stream) { return static_cast<size_t>(stream.id()); }

void register_simulated_device() {
  static const bool is_done = [] {
    static Hooks hooks;
    static const c10::impl::DeviceGuardImplRegistrar guard(kSimulated, new Guard);
    at::RegisterPrivateUse1HooksInterface(&hooks);
    c10::SetAllocator(kSimulated, &simulated_allocator());
    return true;
  }();
  static_cast<void>(is_done);
}

}  // namespace fsdp::bench
