#pragma once

#include <chrono>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "fsdp/communicator.hpp"

namespace fsdp {

struct BorrowedGroupOptions {
  std::vector<int> world_ranks;  ///< the members as ranks of the default world, in group order
  c10::DeviceType device_type = c10::DeviceType::CPU;
  std::chrono::milliseconds timeout = std::chrono::minutes(10);  ///< of backends made beside it
};

/// A process group that somebody else made and goes on using (Python's `torch.distributed`), as a
/// Communicator: gloo, NCCL, a fake one, or a class of the user's own.
///
/// Over gloo the tensors go through a backend of ours that is made beside it from its store, as c10d's
/// all-gather sends every byte several times (see Note [Pairwise exchange]): the call is a collective one
/// then. Where a group has no store, it cannot be split, and its ranks do not compare their schedules.
///
/// Throws UsageError for a group without a backend for the device type, CommError if the ranks cannot connect.
std::shared_ptr<Communicator> borrowed_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                             BorrowedGroupOptions options);

}  // namespace fsdp
