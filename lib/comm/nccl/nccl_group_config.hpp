// Only in builds with CUDA.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/nccl/comm_streams.hpp"
#include "comm/nccl/nccl_api.hpp"
#include "comm/notice_board.hpp"
#include "comm/watch/group_place.hpp"

namespace fsdp {

struct NcclGroupConfig {
  std::string name;
  int rank = 0;
  int size = 1;
  /// Tells this group from all others of the world; the same on all ranks, which leave each other notes under it.
  std::string key;
  c10::intrusive_ptr<c10d::Store> store;  ///< whose keys only this group uses
  std::shared_ptr<NoticeBoard> notices;
  const NcclApi* api = nullptr;
  std::shared_ptr<CommStreams> streams;
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  std::chrono::milliseconds watch_interval = std::chrono::milliseconds(100);
  std::shared_ptr<GroupPlace> place = std::make_shared<GroupPlace>();
  int gathers_cta_policy = NCCL_CONFIG_UNDEF_INT;  ///< NCCL's, of the communicator for all-gathers
};

}  // namespace fsdp
