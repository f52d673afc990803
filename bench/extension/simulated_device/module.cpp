// The simulated device and its collectives, for Python.
#include <torch/csrc/utils/pybind.h>

#include "extension/simulated_device/simulated_backend.hpp"
#include "extension/simulated_device/simulated_device.hpp"

namespace {

namespace bench = fsdp::bench;
using namespace pybind11::literals;

c10::intrusive_ptr<c10d::Backend> make_backend(int rank, int size, double launch_us, double ring_us, double us_per_byte,
                                               double reduce_passes, double all_reduce_passes) {
  return c10::make_intrusive<bench::SimulatedBackend>(rank, size,
                                                      bench::SimulatedRing{.launch_us = launch_us,
                                                                           .ring_us = ring_us,
                                                                           .us_per_byte = us_per_byte,
                                                                           .reduce_passes = reduce_passes,
                                                                           .all_reduce_passes = all_reduce_passes});
}

pybind11::list take_slices() {
  pybind11::list result;
  for (const auto& slice : bench::simulated_streams().take_slices()) {
    pybind11::dict about;
    about["name"] = slice.name;
    about["bytes"] = slice.bytes;
    about["alone_us"] = slice.alone_us;
    about["launched_us"] = slice.launched_us;
    about["begin_us"] = slice.moment->begin_us;
    about["end_us"] = slice.moment->end_us;
    result.append(about);
  }
  return result;
}

}  // namespace

PYBIND11_MODULE(fsdp_bench_simulated_device, m) {
  pybind11::module_::import("torch.distributed");  // registers c10d::Backend, which is returned below
  m.def("register_device", &bench::register_simulated_device);
  m.def("make_backend", &make_backend, "rank"_a, "size"_a, "launch_us"_a, "ring_us"_a, "us_per_byte"_a,
        "reduce_passes"_a = 1, "all_reduce_passes"_a = 2);
  // On the current stream.
  m.def("compute", [](double us, const std::string& name) {
    bench::simulated_streams().compute(bench::number_of(bench::current_simulated_stream()), us, name);
  });
  m.def("synchronize", [] { bench::simulated_streams().synchronize_all(); });
  m.def("now_us", [] { return bench::simulated_streams().now_us(); });
  m.def("take_slices", &take_slices);
  m.def("reset_peak", &bench::reset_simulated_peak);
  m.def("peak_bytes", [] { return bench::simulated_memory().peak_bytes; });
}
