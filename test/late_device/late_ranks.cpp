#include "late_ranks.hpp"

#include <c10/core/DeviceGuard.h>

#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "base/side_stream.hpp"
#include "comm/nccl/nccl_communicator.hpp"
#include "comm/nccl_substitute.hpp"
#include "late_streams.hpp"
#include "support/ranks.hpp"

namespace fsdp::test {
namespace {

const bool answers = [] {
  set_capture_query(kLate, [](c10::Stream stream) {
    return LateDevices::streams(stream.device_index())->is_capturing(handle_of(stream));
  });
  return true;
}();

}  // namespace

std::vector<std::string> errors_on_late(const LateRanksOptions& options,
                                        const std::function<void(LateRank& rank)>& rank_main) {
  std::vector<std::string> errors(options.world_size);
  const NcclSubstitute nccl({.polls = 1});
  {
    const LateDevices devices(options.streams);
    const auto store = c10::make_intrusive<c10d::HashStore>();
    const auto run_one = [&](int index) {
      const c10::DeviceGuard device(late(index));
      try {
        LateRank rank{make_nccl_communicator({.store = store,
                                              .rank = index,
                                              .size = options.world_size,
                                              .timeout = patience(),
                                              .watch_interval = std::chrono::milliseconds(5),
                                              .api = &nccl.api(),
                                              .streams = LateDevices::streams(index)})};
        rank_main(rank);
      } catch (const std::exception& error) {
        errors[index] = message_of(error);
      }
    };
    std::vector<std::thread> threads;
    for (int index = 0; index < options.world_size; ++index) threads.emplace_back(run_one, index);
    for (auto& thread : threads) thread.join();
  }
  for (const auto& misuse : nccl.misuses()) errors.push_back("NCCL: " + misuse);
  return errors;
}

}  // namespace fsdp::test
