#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "fsdp/api.hpp"
#include "fsdp/communicator.hpp"
#include "fsdp/launch_environment.hpp"

namespace fsdp {

struct FSDP_API ProcessGroupOptions {
  /// "gloo", "c10d_nccl" (NCCL through c10d), "nccl" (NCCL's own API) or "single". Empty: c10d_nccl if each local rank has a
  /// GPU, else gloo. nccl alone has symmetric memory; it becomes the default when it has been shown right and faster on GPUs.
  std::string backend = {};
  /// "env://" (MASTER_ADDR, MASTER_PORT), "tcp://host:port" or "file:///path". Empty: env://.
  std::string init_method = {};
  std::optional<int> rank = {};        ///< empty: from the launcher
  std::optional<int> world_size = {};  ///< empty: from the launcher; no launcher: 1
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// Backend nccl, NCCL 2.29: the GPUs' copy engines run all-gathers into symmetric memory
  /// (`FSDPModule::set_symm_mem_for_comm`), so that these take no multiprocessors from compute. NVLink has to connect all
  /// ranks of a group. NCCL_CTA_POLICY=2 in the environment does the same.
  bool use_copy_engine_all_gather = false;
};

/// Makes the process's world, which is then the default one. Without a launcher, rank and world size, it has one rank. With
/// gloo, the process ignores SIGPIPE from then on, unless it handles it.
///
/// Throws UsageError for an unknown backend, and for options that contradict each other or that the backend does not have;
/// StateError if there is a default world already; CommError if the other ranks cannot be reached within `timeout`.
FSDP_API std::shared_ptr<Communicator> init_process_group(const ProcessGroupOptions& options = {});

/// The default world. If there is none, it is made from the launcher's variables. Throws StateError in a thread of
/// `run_ranks`, where each rank gets its world as an argument.
FSDP_API std::shared_ptr<Communicator> default_process_group();

/// True if there is a default world.
FSDP_API bool is_initialized();

/// Drops the default world. Groups that are still in use stay valid.
FSDP_API void destroy_process_group();

struct FSDP_API ThreadRanksOptions {
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  /// Whether the communicators can launch batches, as NCCL does.
  bool launches_batches = false;
  /// Tensors with fewer bytes are packed together in a batched launch.
  int64_t packs_below = 0;
};

/// Runs `rank_main(world)` in `world_size` threads of this process that form a world, and returns when all have ended. If one
/// throws, run_ranks throws its exception, and collectives of the other ranks fail with CommError and do not hang.
FSDP_API void run_ranks(int world_size, const std::function<void(std::shared_ptr<Communicator>)>& rank_main,
                        const ThreadRanksOptions& options = {});

/// A world of one rank. Nothing is communicated, and nothing is copied that need not be.
FSDP_API std::shared_ptr<Communicator> single_rank();

}  // namespace fsdp
