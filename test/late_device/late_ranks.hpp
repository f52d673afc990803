#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/communicator.hpp"
#include "late_device.hpp"

namespace fsdp::test {

/// One rank: a thread whose current device is its own late device, in a world over NCCL's substitute.
struct LateRank {
  std::shared_ptr<Communicator> world;
  int index() const { return world->rank(); }
  int size() const { return world->size(); }
  c10::Device device() const { return late(index()); }
};

struct LateRanksOptions {
  int world_size = 2;
  HostStreams::Options streams = {};
};

/// What each rank threw; "" where that is nothing. What NCCL would not have forgiven is told at the end.
std::vector<std::string> errors_on_late(const LateRanksOptions& options,
                                        const std::function<void(LateRank& rank)>& rank_main);

}  // namespace fsdp::test
