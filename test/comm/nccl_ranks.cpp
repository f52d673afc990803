#include "nccl_ranks.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/nccl/nccl_communicator.hpp"
#include "fsdp/error.hpp"

namespace fsdp::test {

std::vector<std::string> errors_on_nccl(const NcclSubstitute& nccl, const NcclRanksOptions& options,
                                        const std::function<void(NcclRank& rank)>& rank_main) {
  std::vector<std::string> messages(options.world_size);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto run_one = [&](int index) {
    auto streams = options.streams;
    streams.seed += index;
    try {
      NcclRank rank{.world = nullptr, .streams = std::make_shared<HostStreams>(streams)};
      rank.world = make_nccl_communicator({.store = store,
                                           .rank = index,
                                           .size = options.world_size,
                                           .timeout = options.timeout,
                                           .watch_interval = std::chrono::milliseconds(5),
                                           .use_copy_engine_all_gather = options.use_copy_engine_all_gather,
                                           .api = &nccl.api(),
                                           .streams = rank.streams});
      rank_main(rank);
    } catch (const c10::Error& error) {
      messages[index] = error.what_without_backtrace();
    } catch (const std::exception& error) {  // whatever it is: the other tests go on
      messages[index] = error.what();
    }
  };
  std::vector<std::thread> threads;
  for (int index = 0; index < options.world_size; ++index) threads.emplace_back(run_one, index);
  for (std::thread& thread : threads) thread.join();
  return messages;
}

std::vector<std::string> errors_on_nccl(int world_size, const RankMain& rank_main, std::chrono::milliseconds timeout) {
  const NcclSubstitute nccl({.polls = 2});
  auto messages =
      errors_on_nccl(nccl,
                     {.world_size = world_size,
                      .timeout = timeout,
                      .streams = {.max_delay = std::chrono::microseconds(200)}},
                     [&](NcclRank& rank) { rank_main(*rank.world); });
  if (const auto misuses = nccl.misuses(); !misuses.empty())
    messages[0] += fmt::format("NCCL was used wrongly: {}", fmt::join(misuses, "; "));
  return messages;
}

}  // namespace fsdp::test
