#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "host_streams.hpp"
#include "nccl_substitute.hpp"
#include "rank_results.hpp"

namespace fsdp::test {

/// One rank over the substitute, in a thread of its own.
struct NcclRank {
  std::shared_ptr<Communicator> world;
  std::shared_ptr<HostStreams> streams;
};

struct NcclRanksOptions {
  int world_size = 2;
  std::chrono::milliseconds timeout = beyond_patience();
  HostStreams::Options streams = {};  ///< the seed is one more on each rank
  bool use_copy_engine_all_gather = false;
};

/// As `errors_on_threads`. The caller's current stream is the thread itself, unless `rank_main` makes it another.
std::vector<std::string> errors_on_nccl(const NcclSubstitute& nccl, const NcclRanksOptions& options,
                                        const std::function<void(NcclRank& rank)>& rank_main);

/// The same for tests that know nothing of NCCL, over a substitute of its own. Wrong uses of NCCL are errors too.
std::vector<std::string> errors_on_nccl(int world_size, const RankMain& rank_main, std::chrono::milliseconds timeout);

}  // namespace fsdp::test
