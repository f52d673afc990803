#pragma once

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/notice_board.hpp"
#include "comm/watch/group_place.hpp"
#include "fsdp/communicator.hpp"

namespace fsdp {

/// Makes the backend of one group out of a store that only the group's ranks use.
using BackendFactory = std::function<c10::intrusive_ptr<c10d::Backend>(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size)>;

/// A group over c10d.
struct C10dGroup {
  c10::intrusive_ptr<c10d::Backend> backend;
  std::vector<int> world_ranks;
  std::string name = "world";
  c10::DeviceType device_type = c10::DeviceType::CPU;
  /// Both are needed to split; a group without them cannot.
  c10::intrusive_ptr<c10d::Store> store = {};
  BackendFactory make_backend = {};
  /// The backend has c10d's coalesced all-gather and reduce-scatter of tensors.
  bool launches_batches = false;
  int64_t packs_below = 0;  ///< see Communicator::packs_below
  /// Others use the backend too: it is not shut down when the group goes.
  bool is_borrowed = false;
  /// The notice board of the world that the group was split from; null: the group is a world itself, and its store makes the
  /// board.
  std::shared_ptr<NoticeBoard> notices = {};
  std::shared_ptr<GroupPlace> place = std::make_shared<GroupPlace>();
};

/// Makes a Communicator of any c10d backend: gloo, NCCL, or what a Python user brings. Waiting for CPU tensors ends at the
/// latest `timeout of the backend` after the collective began.
std::shared_ptr<Communicator> c10d_communicator(C10dGroup group);

}  // namespace fsdp
