#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "fsdp/communicator.hpp"

namespace fsdp {

struct BorrowedGroupOptions {
  std::vector<int> world_ranks;  ///< the members as ranks of the default world, in group order
  c10::DeviceType device_type = c10::DeviceType::CPU;
  std::chrono::milliseconds timeout = std::chrono::minutes(10);  ///< of backends made beside it
  /// Makes a group of the same kind of some members, given as ranks of the default world in ascending order;
  /// these call it, the others do not. Empty: a kind that is not gloo or NCCL cannot be split.
  std::function<c10::intrusive_ptr<c10d::ProcessGroup>(const std::vector<int>& world_ranks, const std::string& name)>
      new_group = {};
};

/// A process group that somebody else made and goes on using (Python's `torch.distributed`), as a
/// Communicator: gloo, NCCL, a fake one, or a class of the user's own.
///
/// Over gloo the tensors go through a backend of ours that is made beside it from its store, as c10d's
/// all-gather sends every byte several times (see Note [Pairwise exchange]): the call is a collective one
/// then. Of the kinds that are the owner's alone, `new_group` makes the groups that are split off, and ranks do
/// not compare their schedules.
///
/// Throws UsageError for a group without a backend for the device type, CommError if the ranks cannot connect.
std::shared_ptr<Communicator> borrowed_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                             BorrowedGroupOptions options);

}  // namespace fsdp
