// Only in builds with CUDA.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <functional>
#include <list>
#include <mutex>
#include <span>
#include <string>

#include "comm/nccl/call_beside.hpp"
#include "comm/nccl/nccl_api.hpp"

namespace fsdp {

// Note [Calls of NCCL that block]
// A communicator that does not block has NCCL start a thread for each group of launches, while the caller asks again and
// again whether it is done: tens of microseconds of the host's time for each collective. So ours block, as c10d's do, and
// launches run on the caller's thread. One that hangs there, as its peers do not answer, is ended by an abort from another
// thread: whoever calls it is the watchdog. Connecting and closing wait for other ranks as a matter of course, and an abort
// amid either would free what the call still uses. These run on a thread of their own, which is left to itself where the
// caller's patience ends. (The user's NCCL_COMM_BLOCKING=0 comes before what we ask for: then what takes time is "in
// progress", and asked for again and again.)

/// One NCCL communicator of this rank. See Note [Calls of NCCL that block].
///
/// connect, launch and close: one thread at a time. The others may be called from any thread.
class NcclLink {
 public:
  /// `api` outlives the link. cta_policy: NCCL's.
  explicit NcclLink(const NcclApi& api, int cta_policy = NCCL_CONFIG_UNDEF_INT) : api_(api), cta_policy_(cta_policy) {}
  NcclLink(const NcclLink&) = delete;
  NcclLink& operator=(const NcclLink&) = delete;

  bool is_connected() const { return is_connected_.load(std::memory_order_acquire); }

  /// Returns when all `size` ranks that were given `id` are connected, each with the device that it names.
  void connect(const ncclUniqueId& id, int rank, int size, c10::Device device, const Patience& patience);

  /// Queues what `enqueue` calls as one launch, and returns when it is on its stream.
  /// Throws CommError with NCCL's message; the link is to be aborted then.
  void launch(const std::function<ncclResult_t(ncclComm_t comm)>& enqueue, const Patience& patience);

  /// Registers memory of ncclMemAlloc as a symmetric window, `bytes` long on every rank: returns when all ranks of the
  /// communicator have. Null: NCCL has no windows on these devices. Throws as `launch` does.
  ncclWindow_t register_window(void* memory, size_t bytes, const Patience& patience);
  /// Takes this rank's registration of the window back. Nothing that uses it is under way any more. Does nothing if an abort or
  /// the end of the communicator has done it already.
  void deregister_window(ncclWindow_t window);

  /// Returns NCCL's message if it has found that something went wrong since. Empty: it has not, or the link is being used at
  /// this moment and its user will be told.
  std::string async_error();

  /// Waits until NCCL is done with everything queued, and with the graphs that it was captured into, and frees the
  /// communicator. Throws what `patience` does: NCCL frees it by itself then, when it is done, and it is not ours any more.
  void close(c10::Device device, const Patience& patience);

  /// Ends what runs on the device and frees the communicators, together, as NCCL wants it where one's kernels
  /// could keep the other's memory from being freed. A call under way is given a moment to return, and then is
  /// made to.
  static void abort(std::span<NcclLink* const> links);

 private:
  void check(ncclResult_t result) const;
  void await_ready(const Patience& patience) const;
  void stop_if_aborted() const;

  const NcclApi& api_;
  const int cta_policy_;
  std::list<ncclWindow_t> windows_;  // each is written by a thread of NCCL's, for which it stays where it is
  std::timed_mutex mutex_;  // held while NCCL is called with comm_
  std::atomic<bool> is_connected_{false};
  std::atomic<bool> is_aborted_{false};
  std::atomic<ncclComm_t> comm_{nullptr};  // an abort that does not get the lock reads it without
};

/// A sum of what each rank multiplies by `scale` before it is sent. To be made inside NcclLink::launch, with its
/// communicator; it may go once the calls that it was given to have returned.
class NcclScaledSum {
 public:
  /// dtype: one of NCCL's floating-point types that hold a `scale`.
  NcclScaledSum(const NcclApi& api, double scale, ncclDataType_t dtype, ncclComm_t comm);
  ~NcclScaledSum();
  NcclScaledSum(const NcclScaledSum&) = delete;
  NcclScaledSum& operator=(const NcclScaledSum&) = delete;

  ncclRedOp_t op() const { return op_; }

 private:
  const NcclApi& api_;
  ncclComm_t comm_;
  ncclRedOp_t op_ = ncclSum;
};

}  // namespace fsdp
