// The device for a Python program that loads this library.
#include "late_device.hpp"

/// Once. They live as long as the program.
extern "C" __attribute__((visibility("default"))) void make_late_devices() {
  static auto* devices = new fsdp::test::LateDevices({.max_delay = std::chrono::microseconds(200)});
  static_cast<void>(devices);
}
