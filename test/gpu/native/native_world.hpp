#pragma once

#include <catch2/catch.hpp>
#include <torch/torch.h>

#include <chrono>
#include <string>

#include "fsdp/error.hpp"
#include "support/device_ranks.hpp"
#include "support/skip.hpp"

// One rank of a world of processes: over the native NCCL communicator or, on the CPU, gloo. Each process runs each case.
namespace fsdp::test {

using namespace std::chrono_literals;

inline bool is_on_gpu() { return test_device() != c10::DeviceType::CPU; }

/// The host waits for all that is queued on the device.
void synchronize_device();

/// Writes a figure that a case has measured to FSDP_TEST_FIGURES, as one JSON object with `name` as "figure"; `fields` are
/// the rest of it: "\"us\": 3".
void tell_figure(const std::string& name, const std::string& fields);

/// True where other ranks are there; says what is skipped otherwise.
inline bool has_other_ranks(const Communicator& group) {
  if (group.size() == 1) skip("a rank alone");
  return group.size() > 1;
}

at::TensorOptions on_device(at::ScalarType dtype = at::kFloat);

/// The message of the CommError that `body` throws; empty: it throws none.
template <class Body>
std::string comm_error_of(Body&& body) {
  try {
    body();
  } catch (const CommError& error) {
    return error.what();
  }
  return {};
}

}  // namespace fsdp::test
