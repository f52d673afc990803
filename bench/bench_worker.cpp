#include "bench_worker.hpp"

#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <iostream>
#include <string>

#include "fsdp/error.hpp"
#include "fsdp/process_group.hpp"
#include "fsdp/version.hpp"

namespace fsdp::bench {
namespace {

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  if (value == nullptr) {
    throw UsageError(std::string("fsdp_bench: ") + name +
                     " is not set; workers are started by tools/bench");
  }
  return value;
}

}  // namespace

std::optional<int> answer_options(int argc, char** argv, const std::string& about) {
  if (argc < 2) return std::nullopt;
  const std::string program = std::filesystem::path(argv[0]).filename(), option = argv[1];
  if (option == "-h" || option == "--help") {
    std::cout << program << " [-h | --help | --version]: " << about
              << ", which tools/bench starts and asks: one JSON request a line of the standard input\n";
    return 0;
  }
  if (option == "--version") {
    std::cout << "libfsdp " << version() << '\n';
    return 0;
  }
  std::cerr << program << ": unknown option " << option << "; " << program << " --help says what it is for\n";
  return 2;
}

void serve(const Answer& answer) {
  std::string line;
  while (std::getline(std::cin, line)) {
    const auto reply = answer(nlohmann::json::parse(line));
    std::cout << "@reply " << reply.dump() << std::endl;
  }
}

std::shared_ptr<Communicator> join_world(const std::string& backend) {
  return init_process_group({.backend = backend,
                             .init_method = "file://" + variable("FSDP_BENCH_STORE"),
                             .rank = std::stoi(variable("RANK")),
                             .world_size = std::stoi(variable("WORLD_SIZE"))});
}

void barrier(Communicator& world) {
  const auto one = torch::zeros({1}, world.device_type());
  world.start_all_reduce(one, ReduceOp::kSum, "barrier")->wait();
  (void)one.item<float>();  // on a device the wait is a stream's
}

double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double seconds(const std::function<void()>& function) {
  const auto begin = std::chrono::steady_clock::now();
  function();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace fsdp::bench
