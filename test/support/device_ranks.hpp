#pragma once

#include <torch/torch.h>

#include <fsdp/fsdp.hpp>
#include <memory>
#include <optional>
#include <string>

// Tests on another device than the CPU, whose ranks are processes: autograd has one thread for a device, in which ranks
// that are threads would wait for each other.
namespace fsdp::test {

/// FSDP_TEST_DEVICE: cpu (the default) or cuda.
c10::DeviceType test_device();

/// While it lives, tensors that this thread makes of sizes alone, with no device named, are on the test's device. Tensors made
/// of values, and what a given generator draws, stay on the CPU.
class OnTestDevice {
 public:
  explicit OnTestDevice(c10::DeviceType type = test_device());
  ~OnTestDevice();
  OnTestDevice(const OnTestDevice&) = delete;
  OnTestDevice& operator=(const OnTestDevice&) = delete;

 private:
  c10::DeviceType before_;
};

/// How many processes run these tests together, one rank each; none: ranks are threads of this one.
/// test/gpu/run_native.py says it by FSDP_TEST_RANKS.
std::optional<int> rank_processes();

/// A world of all of them over the native NCCL communicator (with FSDP_TEST_COPY_ENGINE=1 gathers by copy engines) or, on the
/// CPU, gloo: the same one at every call. It starts with a timeout of half a minute, or that of the first call.
std::shared_ptr<Communicator> process_world(std::chrono::milliseconds timeout = std::chrono::seconds(30));

/// A group of all processes for one case, so that none that failed is used again; over NCCL also where there is one rank. A
/// collective call.
std::shared_ptr<Communicator> group_of_all();

/// The same, or for `ranks` 1 a group of this process alone.
std::shared_ptr<Communicator> fresh_process_group(int ranks);

}  // namespace fsdp::test
