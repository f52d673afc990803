#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/communicator.hpp"
#include "support/patience.hpp"

namespace fsdp::test {

using RankMain = std::function<void(Communicator& world)>;

/// Runs `rank_main` on every rank of a world and catches what each throws. Catch2's assertions are
/// not thread-safe: ranks fill vectors, and the test looks at them afterwards.
/// Returns the message of the CommError or UsageError of each rank; empty: none.
/// Any other exception passes through.
std::vector<std::string> errors_on_threads(int world_size, const RankMain& rank_main,
                                           std::chrono::milliseconds timeout,
                                           bool launches_batches = false);

/// The same over gloo: ranks are threads of this process, connected through loopback sockets.
std::vector<std::string> errors_on_gloo(int world_size, const RankMain& rank_main,
                                        std::chrono::milliseconds timeout);

/// A world that the tests of values run on.
struct Backend {
  std::string name;
  std::function<std::vector<std::string>(int world_size, const RankMain& rank_main)> run;
};

/// Threads, gloo, and in builds with CUDA NCCL over its substitute, with a timeout that no correct test reaches.
const std::vector<Backend>& value_backends();

/// No rank threw anything.
std::vector<std::string> no_errors(int world_size);

/// start, then wait.
void all_gather(Communicator& comm, const at::Tensor& output, const at::Tensor& input,
                const std::string& subject = "subject");
void reduce_scatter(Communicator& comm, const at::Tensor& output, const at::Tensor& input,
                    ReduceOp op = ReduceOp::kSum, const std::string& subject = "subject");
void all_reduce(Communicator& comm, const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum,
                const std::string& subject = "subject");
void broadcast(Communicator& comm, const at::Tensor& tensor, int root,
               const std::string& subject = "subject");

/// A file name that no other test uses; nothing is there.
std::string unused_path();

}  // namespace fsdp::test
