#include "bench_device.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "bench_worker.hpp"
#include "fsdp/error.hpp"

#ifdef FSDP_BENCH_HAS_CUDA
#include <ATen/cuda/Sleep.h>
#endif

namespace fsdp::bench {

namespace {

void spin_cycles([[maybe_unused]] int64_t cycles) {
#ifdef FSDP_BENCH_HAS_CUDA
  at::cuda::sleep(cycles);
#else
  throw UsageError("fsdp_bench: this build has no CUDA; build with -Dcuda=enabled and a CUDA build of torch");
#endif
}

}  // namespace

c10::Device current_device(c10::DeviceType type) {
  if (type == c10::DeviceType::CPU) return c10::Device(type);
  if (!c10::impl::hasDeviceGuardImpl(type) || c10::impl::VirtualGuardImpl(type).deviceCount() == 0)
    throw UsageError("fsdp_bench: expected a device of type " + c10::DeviceTypeName(type) + ", found none");
  return c10::impl::VirtualGuardImpl(type).getDevice();
}

void synchronize(c10::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

DeviceSpin::DeviceSpin(c10::Device device) {
  // Long beside a launch; the first one also wakes the device up.
  constexpr int64_t kCycles = 20'000'000;
  for (int turn = 0; turn < 2; ++turn) {
    synchronize(device);
    const double taken = seconds([&] {
      spin_cycles(kCycles);
      synchronize(device);
    });
    cycles_per_us_ = static_cast<double>(kCycles) / (1e6 * taken);
  }
}

void DeviceSpin::operator()(double us) const { spin_cycles(static_cast<int64_t>(us * cycles_per_us_)); }

}  // namespace fsdp::bench
