// fsdp_bench_overlap: the worker of all_gather_overlap and scale. It counts no instructions, so it is there without
// valgrind's headers, for the tests.
#include <exception>
#include <iostream>

#include "bench_worker.hpp"

int main(int argc, char** argv) {
  const auto exit_code = fsdp::bench::answer_options(argc, argv, "the worker of all_gather_overlap and scale");
  if (exit_code) return *exit_code;
  try {
    fsdp::bench::serve_overlap();
  } catch (const std::exception& error) {
    std::cerr << "fsdp_bench_overlap: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
