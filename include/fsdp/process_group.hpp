#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "fsdp/communicator.hpp"
#include "fsdp/launch_environment.hpp"

namespace fsdp {

struct ProcessGroupOptions {
  /// "gloo", "nccl", "c10d_nccl" (NCCL through c10d) or "single"; empty: nccl if each local rank has a GPU, else gloo.
  std::string backend = {};
  /// "env://" (MASTER_ADDR, MASTER_PORT), "tcp://host:port" or "file:///path"; empty: env://.
  std::string init_method = {};
  std::optional<int> rank = {};        ///< empty: from the launcher
  std::optional<int> world_size = {};  ///< empty: from the launcher; no launcher: 1
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// Backend nccl: all-gathers into symmetric memory (`FSDPModule::set_symm_mem_for_comm`) are made by the GPUs' copy
  /// engines and take none of their processors from the compute, where NVLink joins all ranks of a group. Needs NCCL
  /// 2.28. NCCL_CTA_POLICY=2 in the environment does the same.
  bool gathers_by_copy_engine = false;
};

/// Starts the process's world and makes it the default one. Without launcher, rank and world size it is one rank, which
/// communicates nothing. With gloo the whole process ignores SIGPIPE from now on, unless it handles it.
/// Throws UsageError for an unknown backend and for options that contradict each other or that the backend does not
/// have, StateError if there is a default world already, CommError if the other ranks cannot be reached in `timeout`.
std::shared_ptr<Communicator> init_process_group(const ProcessGroupOptions& options = {});

/// The world that `init_process_group` made; made now from the launcher's variables if there is none.
/// Throws StateError in a thread of `run_ranks`: ranks that are threads share no default.
std::shared_ptr<Communicator> default_process_group();

/// True once there is a default world.
bool is_initialized();

/// Forgets the default world; groups still in use live on.
void destroy_process_group();

struct ThreadRanksOptions {
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  /// Whether the communicators offer batched launches, as NCCL does.
  bool launches_batches = false;
  /// Bytes below which pieces of a batched launch are packed together.
  int64_t packs_below = 0;
};

/// Runs `rank_main(world)` in `world_size` threads of this process that form a world.
/// Returns when all have ended. If one throws, its exception is thrown here, and collectives that
/// wait for it fail with CommError on the other ranks instead of hanging.
void run_ranks(int world_size, const std::function<void(std::shared_ptr<Communicator>)>& rank_main,
               const ThreadRanksOptions& options = {});

/// A world of one rank, in which nothing is communicated or copied that need not be.
std::shared_ptr<Communicator> single_rank();

}  // namespace fsdp
