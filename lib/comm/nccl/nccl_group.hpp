// Only in builds with CUDA.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/comm_memory.hpp"
#include "comm/nccl/nccl_abort.hpp"
#include "comm/nccl/nccl_channel.hpp"
#include "comm/nccl/nccl_group_config.hpp"
#include "comm/nccl/nccl_watchdog.hpp"
#include "comm/nccl/nccl_windows.hpp"
#include "comm/work.hpp"

namespace fsdp {

/// What is to be launched.
struct NcclCollective {
  CollectiveInfo info;
  std::vector<at::Tensor> tensors;  ///< kept until it is waited for, or done
  std::function<ncclResult_t(ncclComm_t comm, StreamHandle stream)> enqueue;
};

// Note [Two NCCL communicators]
// A NCCL communicator runs one collective after another, in the order of their launches and whatever their streams:
// one for all would let the gather of the next parameters wait for the reduction of the last gradients. So all-gathers
// (and broadcasts) have a communicator and a stream, and reduce-scatters and all-reduces have another communicator and
// stream. A stream of their own would bring all-reduces nothing but one more event each way, as they share a
// communicator with the reduce-scatters; the all-reduces of HSDP go over the replicate group, whose communicators are
// others than the shard group's, and so do run beside its reduce-scatters.
//
// Kernels of two communicators may wait for their peers at the same time on one device. Two that do not both fit beside
// what else runs there, and that one rank's device has begun in another order than another's, wait for each other for ever.
// Every user of a Communicator launches in the same order on all ranks; NCCL is asked to keep the devices to it
// (order_nccl_launches), which it can from 2.26 on. With CUDA 12.3 it does so where kernels begin, and they run beside each
// other still; with an older driver each communicator's wait for the other's.
//
// A group connects each of the two when it is first used, which all ranks do in the same order. Most groups of a mesh
// need only one, and each costs time to connect and some 100 MB of the device's memory.

/// What the ranks of one group share with their watchdog: two NCCL communicators, memory that they have registered, and
/// what went wrong.
///
/// launch, make_slot, close: one thread at a time. The others: any thread.
class NcclGroup final : public Watched, public std::enable_shared_from_this<NcclGroup> {
 public:
  explicit NcclGroup(NcclGroupConfig config);

  /// all-gathers and broadcasts / reductions.
  NcclChannel& gathers() { return gathers_; }
  NcclChannel& reductions() { return reductions_; }

  /// Throws CommError if the group has failed, or fails now.
  std::shared_ptr<Work> launch(NcclChannel& channel, NcclCollective collective);

  /// Makes a slot, as HasCommMemory::make_slot says.
  std::shared_ptr<SymmMemBuffer> make_slot(SlotUse use, int64_t bytes);
  /// Gives a slot up: nobody gathers into it or reduces from it any more. Its registration is given back once nothing that is
  /// under way uses it; the memory stays the block's. When the group ends, at the latest: where an exception is under way, or
  /// where a graph may run again what it has captured of it. Until then the block stays.
  void let_go_of_slot(std::shared_ptr<NcclBlock> block) noexcept;

  /// Fails the group with this reason, unless it has failed already. Returns at once: another thread aborts NCCL and tells the
  /// other ranks.
  void fail(const std::string& reason);

  void look(std::vector<at::Tensor>& unused) override;

  /// Nothing is launched any more. Waits for what is under way if all is well; else aborts it. Where a graph that has captured
  /// collectives lives on it says so, and does not wait for long.
  void close();

 private:
  class FlightWork;

  NcclChannel& channel_of(SlotUse use) { return use == SlotUse::kGathers ? gathers_ : reductions_; }
  void connect(NcclChannel& channel);
  void enqueue(NcclChannel& channel, NcclCollective& collective, const std::shared_ptr<NcclFlight>& flight);
  Patience patience(std::function<std::string()> too_late);
  bool await_quiet(const NcclChannel& channel, std::chrono::milliseconds most);
  void give_back_window(NcclBlock& block) noexcept;
  std::shared_ptr<NcclBlock> make_block(SlotUse use, int64_t bytes);
  bool enroll(const std::shared_ptr<NcclBlock>& block, int64_t bytes, const std::string& request);
  std::shared_ptr<NcclFlight> oldest() const;

  void check(const CollectiveInfo& info) const;
  void find_failure();
  void abort_links();

  void await_replays();
  void close_links();
  bool close_link(NcclChannel& channel);
  void finish_flights();

  const NcclGroupConfig config_;
  NcclAbort abort_;
  NcclChannel gathers_;
  NcclChannel reductions_;
  NcclWindows windows_;
  std::atomic<bool> has_captured_{false};  // some launch has gone into a graph
  std::chrono::steady_clock::time_point last_notice_;  // the watchdog's
};

}  // namespace fsdp
