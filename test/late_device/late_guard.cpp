// What LibTorch asks of a device's streams and events.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <c10/util/Exception.h>

#include <stdexcept>

#include "late_allocator.hpp"
#include "late_capture.hpp"
#include "late_streams.hpp"

namespace fsdp::test {
namespace {

struct LateGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kLate; }
  c10::DeviceIndex deviceCount() const noexcept override { return kLateDevices; }

  c10::Device getDevice() const override { return late(current_late_device()); }
  void setDevice(c10::Device device) const override {
    if (device.index() < 0 || device.index() >= kLateDevices)
      throw std::logic_error("there is no device " + device.str());
    TORCH_CHECK(!is_lost(device.index()), "late device: ", device.str(), " is lost");
    set_current_late_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (!is_lost(device.index())) set_current_late_device(device.index());
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override { return current_late_stream(index_of(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return late_streams(index_of(device)).default_stream();
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*isHighPriority*/) const override {
    return late_streams(index_of(device)).next_of_pool();
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return late_streams(index_of(device)).new_stream();
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = current_late_stream(stream.device_index());
    set_current_late_stream(stream);
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    note_host_wait(stream.device_index(), handle_of(stream), "a query of a stream");
    return late_streams(stream.device_index()).record(handle_of(stream))->is_done();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    note_host_wait(stream.device_index(), handle_of(stream), "the synchronization of a stream");
    HostStreams::synchronize(handle_of(stream));
  }
  // No `override`: not every LibTorch has it.
  bool isStreamCapturing(const c10::Stream& stream) const {
    return late_streams(stream.device_index()).is_capturing(handle_of(stream));
  }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    TORCH_CHECK(!late_streams(index).is_capturing(),
                "late device: the synchronization of a device: operation not permitted when stream is capturing");
    note_host_wait(index, nullptr, "the synchronization of a device");
    late_streams(index).synchronize_all();
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*index*/,
              c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new Recorded;
    const auto index = stream.device_index();
    *static_cast<Recorded*>(*event) = {late_streams(index).record(handle_of(stream)), index};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    late_streams(stream.device_index()).wait(handle_of(stream), *static_cast<Recorded*>(event)->point);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    const auto& recorded = *static_cast<Recorded*>(event);
    late_streams(recorded.index).refuse_in_capture(nullptr, "a query of an event");
    return recorded.point->is_done();
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const auto& recorded = *static_cast<Recorded*>(event);
    note_host_wait(recorded.index, nullptr, "the synchronization of an event");
    if (dynamic_cast<const CapturedEvent*>(recorded.point.get()) != nullptr) (void)recorded.point->is_done();  // throws
    HostStreams::synchronize(*recorded.point);
  }
  void destroyEvent(void* event, c10::DeviceIndex /*index*/) const noexcept override {
    delete static_cast<Recorded*>(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_late_stream(data, stream);
  }

 private:
  struct Recorded {
    std::shared_ptr<StreamEvent> point;
    c10::DeviceIndex index = 0;
  };
  static c10::DeviceIndex index_of(c10::Device device) {
    return device.has_index() ? device.index() : current_late_device();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, LateGuard);

}  // namespace
}  // namespace fsdp::test
