#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "fsdp/communicator.hpp"

namespace fsdp::bench {

/// One subcommand of fsdp_bench: a worker that answers the conductor's requests (bench/conductor.py)
/// until its input ends.
void serve_host_overhead();
void serve_dtensor_step();
void serve_memory();
void serve_gather_bandwidth();
void serve_gloo_step();
void serve_checkpoint();
void serve_overlap();

/// Answers the options of a worker that has no subcommands: --help and --version, and no others. Returns the exit code; none:
/// there was no option.
std::optional<int> answer_options(int argc, char** argv, const std::string& about);

using Answer = std::function<nlohmann::json(const nlohmann::json& request)>;

/// Reads one JSON request a line from the standard input and writes each answer as one line.
void serve(const Answer& answer);

/// Joins the world that the conductor describes in the environment.
std::shared_ptr<Communicator> join_world(const std::string& backend = "gloo");

/// Waits for all ranks, so that they start what follows together.
void barrier(Communicator& world);

/// CPU time of this process.
double cpu_seconds();

/// Wall-clock seconds that `function` takes.
double seconds(const std::function<void()>& function);

}  // namespace fsdp::bench
