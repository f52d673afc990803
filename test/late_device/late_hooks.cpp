// The device's name, and what LibTorch asks of an accelerator.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceType.h>

#include "late_pinned.hpp"
#include "late_streams.hpp"

namespace fsdp::test {
namespace {

struct LateHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  // Autograd lets streams wait for each other only where this says yes.
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kLateDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_late_device(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_late_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = current_late_device();
    set_current_late_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  // Seeded with the host's, and used by nothing: no random operator is written.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex /*index*/) const override {
    static const auto generator = at::make_generator<at::CPUGeneratorImpl>();
    return generator;
  }
  // Any host memory may be a device's, NCCL's too.
  at::Device getDeviceFromPtr(void* /*memory*/) const override { return late(current_late_device()); }
  bool isPinnedPtr(const void* memory) const override { return is_pinned_for_late(memory); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &late_pinned_allocator(); }
};

const bool is_named = [] {
  c10::register_privateuse1_backend("late");
  static LateHooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

}  // namespace
}  // namespace fsdp::test
