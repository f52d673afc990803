#pragma once

#include <chrono>
#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "fsdp/communicator.hpp"

namespace fsdp {

class CommStreams;
struct NcclApi;

struct NcclWorld {
  c10::intrusive_ptr<c10d::Store> store;  ///< of this world alone
  int rank = 0;
  int size = 1;
  /// The most time for connecting, for a launch, and from a launch to its end on the device.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// The time between two looks of the thread that finds timeouts, NCCL's errors and what other ranks say.
  std::chrono::milliseconds watch_interval = std::chrono::milliseconds(100);
  /// All-gathers into slots (comm_memory.hpp) are run by copy engines and no kernel, where NVLink joins all ranks.
  bool use_copy_engine_all_gather = false;
  const NcclApi* api = nullptr;                    ///< null: the one that LibTorch uses
  std::shared_ptr<CommStreams> streams = nullptr;  ///< null: of the current CUDA device
};

/// A world over NCCL's own API: see Note [Two NCCL communicators].
///
/// Collectives run on streams of the group's own. Each starts behind what is queued on the caller's current stream,
/// and `Work::wait` lets the then current stream run behind it; the host waits for nothing but connecting, at the
/// first collective of each kind. The tensors are kept until the Work is waited for, or until the collective is done
/// where it never is. From the wait on they are the caller's: memory of another stream than the one that waited must
/// not be given back before that stream has waited too.
///
/// A failure on one rank ends the group on all of them: the others find it out within seconds from the store, and
/// from NCCL itself. `abort` returns at once; what runs on the device ends soon after.
///
/// Groups that are split off connect by themselves, with ids of their own: ranks outside of a group take no part,
/// no group waits for its parent to be idle, and none fails with it.
///
/// It offers launches in batches, scaled sums (scaled_sum.hpp) and, where NCCL has windows, slots (comm_memory.hpp).
/// Throws UsageError in a build without CUDA, and where copy engines are asked for that NCCL does not use.
std::shared_ptr<Communicator> make_nccl_communicator(NcclWorld world);

}  // namespace fsdp
