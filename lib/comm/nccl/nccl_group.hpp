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
// Kernels of two communicators may wait for their peers at the same time on one device. That is safe as long as all
// ranks launch them in the same order, which is what every user of a Communicator promises, and both fit on the device
// beside each other, which they do: each takes a few of its processors.
//
// A group connects each of the two when it is first used, which all ranks do in the same order. Most groups of a mesh
// need only one, and each costs time to connect and some 100 MB of the device's memory.

/// What the ranks of one group share with their watchdog: two NCCL communicators, memory that they have registered, and
/// what went wrong.
///
/// launch, make_slot: one thread at a time. The others: any thread.
class NcclGroup final : public Watched, public std::enable_shared_from_this<NcclGroup> {
 public:
  explicit NcclGroup(NcclGroupConfig config);

  /// all-gathers and broadcasts / reductions.
  NcclChannel& gathers() { return gathers_; }
  NcclChannel& reductions() { return reductions_; }

  /// Throws CommError if the group has failed, or fails now.
  std::shared_ptr<Work> launch(NcclChannel& channel, NcclCollective collective);

  /// As HasCommMemory::make_slot.
  std::shared_ptr<SymmMemBuffer> make_slot(SlotUse use, int64_t bytes);
  /// Once nothing that is under way uses it. The memory stays the block's.
  void give_back_window(NcclBlock& block) noexcept;
  /// The same, when the group ends. Until then the block stays.
  void keep_until_close(std::shared_ptr<NcclBlock> block) noexcept { windows_.keep(std::move(block)); }

  /// The first reason stays. Returns at once: another thread aborts NCCL and tells the other ranks.
  void fail(const std::string& reason);

  void look(std::vector<at::Tensor>& unused) override;

  /// Nothing is launched any more. Waits for what is under way if all is well; else aborts it.
  void close();

 private:
  class FlightWork;

  NcclChannel& channel_of(SlotUse use) { return use == SlotUse::kGathers ? gathers_ : reductions_; }
  void connect(NcclChannel& channel);
  void enqueue(NcclChannel& channel, NcclCollective& collective, const std::shared_ptr<NcclFlight>& flight);
  Patience patience(std::function<std::string()> too_late);
  bool await_quiet(const NcclChannel& channel, std::chrono::milliseconds most);
  std::shared_ptr<NcclFlight> oldest() const;

  void check(const CollectiveInfo& info) const;
  void find_failure();
  void abort_links();

  void close_links();
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
