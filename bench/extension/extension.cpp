// What the Python side of the benchmarks needs from C++: the collectives that move nothing, the
// allocator that counts, and callgrind's requests.
#include <torch/csrc/utils/pybind.h>

#include "callgrind_requests.hpp"
#include "extension/no_move_backend.hpp"
#include "support/counting_allocator.hpp"

namespace {

namespace bench = fsdp::bench;
namespace memory = fsdp::test;

c10::intrusive_ptr<c10d::Backend> make_no_move_backend(int rank, int size) {
  return c10::make_intrusive<bench::NoMoveBackend>(rank, size);
}

}  // namespace

PYBIND11_MODULE(fsdp_bench_extension, m) {
  pybind11::module_::import("torch.distributed");  // registers c10d::Backend, which is returned below
  m.def("make_no_move_backend", &make_no_move_backend);
  m.def("start_counting_instructions", &bench::start_counting_instructions);
  m.def("stop_counting_instructions", &bench::stop_counting_instructions);
  m.def("install_counting_allocator", &memory::install_counting_allocator);
  m.def("live_bytes", &memory::live_bytes);
  m.def("start_recording", &memory::start_recording);
  m.def("peak_bytes", &memory::peak_bytes);
  m.def("sizes_at_peak", &memory::sizes_at_peak);
  m.def("allocated_addresses", [] {  // since start_recording
    std::vector<uintptr_t> addresses;
    for (const auto& event : memory::recorded_events())
      if (event.bytes > 0) addresses.push_back(event.address);
    return addresses;
  });
}
