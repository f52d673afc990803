// Only in builds with CUDA.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/comm_memory.hpp"
#include "comm/failure_flag.hpp"
#include "comm/nccl/comm_streams.hpp"
#include "comm/nccl/nccl_link.hpp"
#include "comm/nccl/nccl_watchdog.hpp"
#include "comm/notice_board.hpp"
#include "comm/work.hpp"

namespace fsdp {

class NcclBlock;

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
  int gathers_cta_policy = NCCL_CONFIG_UNDEF_INT;  ///< NCCL's, of the communicator for all-gathers
};

/// One launch.
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

/// What the ranks of one group share with their watchdog: two NCCL communicators, what is under way on them, and
/// what went wrong.
///
/// launch: one thread at a time. The others: any thread.
class NcclGroup final : public Watched, public std::enable_shared_from_this<NcclGroup> {
 public:
  struct Flight;
  struct Channel {
    Channel(const char* name, const NcclApi& api, StreamHandle stream, int cta_policy)
        : name(name), link(api, cta_policy), stream(stream) {}
    const char* name;
    NcclLink link;
    StreamHandle stream;
    std::deque<std::shared_ptr<Flight>> flights;  // guarded by the group's mutex; in their order on the stream
  };

  explicit NcclGroup(NcclGroupConfig config);

  /// all-gathers and broadcasts / reductions.
  Channel& gathers() { return gathers_; }
  Channel& reductions() { return reductions_; }

  /// Throws CommError if the group has failed, or fails now.
  std::shared_ptr<Work> launch(Channel& channel, NcclCollective collective);

  /// Memory, in the order of launches (nccl_memory.cpp). As HasCommMemory::make_slot.
  std::shared_ptr<CommSlot> make_slot(SlotUse use, int64_t bytes);
  /// Once nothing that is under way uses it. The memory stays the block's.
  void give_back_window(NcclBlock& block) noexcept;

  /// The same, when the group ends. Until then the block stays.
  void keep_until_close(std::shared_ptr<NcclBlock> block) noexcept;

  /// The first reason stays. Returns at once: another thread aborts NCCL and tells the other ranks.
  void fail(const std::string& reason);

  void look(std::vector<at::Tensor>& unused) override;

  /// Nothing is launched any more. Waits for what is under way if all is well; else aborts it.
  void close();

 private:
  class FlightWork;

  void connect(Channel& channel);
  ncclUniqueId exchange_id(const Channel& channel, const Patience& patience);
  std::string missing_ranks(const Channel& channel);
  Patience patience(std::function<std::string()> too_late);
  std::string notice();
  void check(const CollectiveInfo& info) const;
  void settle(Channel& channel, std::vector<at::Tensor>& unused);
  std::shared_ptr<Flight> oldest();
  bool all_say(bool yes, const std::string& question, const Patience& patience);
  void give_back_windows();
  Channel& channel_of(SlotUse use) { return use == SlotUse::kGathers ? gathers_ : reductions_; }
  bool await_channel(const Channel& channel, std::chrono::milliseconds most);
  void find_failure();
  void abort_links();
  void tell_others();
  void await_flights();

  const NcclGroupConfig config_;
  FailureFlag failure_;
  Channel gathers_, reductions_;
  std::mutex mutex_;  // of the flights and the blocks
  std::vector<std::weak_ptr<NcclBlock>> blocks_;  // all that may be registered
  std::vector<std::shared_ptr<NcclBlock>> kept_blocks_;
  int slots_made_ = 0;
  bool has_windows_ = true;  // until making one has shown that there are none
  std::chrono::steady_clock::time_point last_notice_;
  std::mutex abort_mutex_;
  std::shared_future<void> aborted_, told_;  // valid once an abort has begun
  std::atomic<bool> has_captured_{false};    // some launch has gone into a graph
};

}  // namespace fsdp
