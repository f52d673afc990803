// fsdp_bench: this project's side of the benchmarks. `tools/bench` starts it and tells it what to measure.
#include <CLI/CLI.hpp>
#include <exception>
#include <iostream>
#include <string>

#include "bench_worker.hpp"
#include "fsdp/version.hpp"

int main(int argc, char** argv) {
  namespace bench = fsdp::bench;
  CLI::App app("libfsdp's side of the benchmarks: workers that tools/bench starts and asks");
  app.set_version_flag("--version", std::string("libfsdp ") + fsdp::version());
  app.require_subcommand(1);
  app.add_subcommand("host_overhead", "steps over a network that is free")
      ->callback(bench::serve_host_overhead);
  app.add_subcommand("dtensor_step", "optimizers and clipping on DTensors")->callback(bench::serve_dtensor_step);
  app.add_subcommand("memory", "peak bytes of live tensors in a step")->callback(bench::serve_memory);
  app.add_subcommand("gather_bandwidth", "gather and reduce of one group")
      ->callback(bench::serve_gather_bandwidth);
  app.add_subcommand("gloo_step", "training steps over gloo")->callback(bench::serve_gloo_step);
  app.add_subcommand("checkpoint", "saving and loading a sharded model")->callback(bench::serve_checkpoint);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const std::exception& error) {
    std::cerr << "fsdp_bench: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
