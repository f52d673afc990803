#include <ATen/ATen.h>

#include <catch2/catch.hpp>

#include "comm/c10d/c10d_communicator.hpp"
#include "comm/comm_memory.hpp"
#include "fsdp/simulated_network.hpp"
#include "fsdp/testing/recording.hpp"

// Buffers for collectives from a backend's own allocator.

namespace fsdp::test {
namespace {

/// Has memory of its own for device 0 only.
struct AllocatingBackend : c10d::Backend {
  AllocatingBackend() : c10d::Backend(/*rank=*/0, /*size=*/1) {}
  const std::string getBackendName() const override { return "allocating"; }
  bool supportsTensorAlloc(c10::DeviceIndex device) override { return device == 0; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    ++allocations;
    return at::full({size}, 7, options);
  }
  int allocations = 0;
};

const auto kDevice0 = at::TensorOptions().device(at::kCPU, 0).dtype(at::kFloat);

TEST_CASE("buffers come from the backend's allocator where it has one", "[comm][comm_memory]") {
  const auto backend = c10::make_intrusive<AllocatingBackend>();
  const auto group = c10d_communicator({.backend = backend, .world_ranks = {0}});
  const auto wrapped = recording(group, std::make_shared<CallLog>());
  const auto gather = process_group_all_gather(wrapped);
  const auto reduce = process_group_reduce_scatter(group);
  for (Comm* comm : {static_cast<Comm*>(gather.get()), static_cast<Comm*>(reduce.get())}) {
    CHECK(is_process_group_comm(comm));
    const int before = backend->allocations;
    const auto buffer = comm->allocate(5, kDevice0);
    CHECK(backend->allocations == before + 1);
    CHECK(buffer.equal(at::full({5}, 7, at::kFloat)));
    // Nothing is asked for a device that it has no memory for, or for no memory.
    CHECK(comm->allocate(5, at::TensorOptions().dtype(at::kByte)).numel() == 5);
    CHECK(comm->allocate(0, kDevice0).numel() == 0);
    CHECK(backend->allocations == before + 1);
  }
}

TEST_CASE("other communicators have no memory of their own", "[comm][comm_memory]") {
  const auto group = simulated_network({.world_size = 2});
  CHECK(!allocate_for_comm(*group, 4, kDevice0).defined());
  const auto buffer = process_group_all_gather(group)->allocate(4, kDevice0);
  CHECK(buffer.numel() == 4);
  AllGatherComm custom;
  CHECK(!is_process_group_comm(&custom));
  CHECK(!is_process_group_comm(nullptr));
}

}  // namespace
}  // namespace fsdp::test
