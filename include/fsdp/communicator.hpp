#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/api.hpp"

namespace fsdp {

class Communicator;

enum class ReduceOp { kSum, kMax, kMin };

/// A collective that was started. Call wait from the thread that uses the result.
class FSDP_API Work {
 public:
  virtual ~Work() = default;

  /// CPU tensors: returns when the collective is done. CUDA tensors: makes the current stream wait for it, and returns at once.
  /// Throws CommError, also on a timeout; it names the operation, the subject and the group. Calling it again is free, and
  /// throws again if the collective failed.
  virtual void wait() = 0;

  /// `wait` in parts, for who looks at something else in between: false if it is not done after a fraction of a second. A
  /// work that cannot tell waits to the end.
  virtual bool wait_briefly() {
    wait();
    return true;
  }

  /// True once `wait` would not block the host. Does not wait.
  virtual bool is_completed() = 0;

  /// Makes the next collective of `other`, and on a device what is queued on the current stream from now on, start after this
  /// one is done. Neither the host nor any other stream waits. `wait` still has to be called. Returns false, and does nothing,
  /// if the backend cannot do this. The result is the same on all ranks and does not depend on whether this collective is
  /// done.
  virtual bool hold_back(Communicator& /*other*/) { return false; }
};

/// A group of ranks that run collectives together.
///
/// All ranks of a group make the same calls in the same order. `start_*` return before the collective is done; its tensors
/// have to stay alive and unchanged until the Work has been waited for. All tensors are contiguous and on the group's device
/// type. All-gather and broadcast take any dtype; the others take the dtypes that the backend can reduce. On CUDA, a
/// collective starts after what is already queued on the current stream.
///
/// `subject` names what a collective is for, such as a parameter group. Errors, logs and recordings show it.
///
/// Every `start_*` throws UsageError if sizes or dtypes do not fit, and CommError if the launch fails. Not thread-safe.
class FSDP_API Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  virtual ~Communicator() = default;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  /// A unique name on this process, such as "world" or "shard[0,1]".
  const std::string& name() const { return name_; }
  /// The members in group order, as ranks of the world.
  const std::vector<int>& ranks() const { return ranks_; }
  /// The device type of its tensors: CPU, or CUDA for NCCL.
  virtual c10::DeviceType device_type() const { return c10::DeviceType::CPU; }
  /// The index of the device that it works on; negative: any, the same one for all tensors of a collective.
  virtual c10::DeviceIndex device_index() const { return -1; }
  /// The backend's short name: "gloo", "nccl", "threads", "single", "simulated"...
  virtual std::string backend() const = 0;

  /// output: size() * input.numel() elements; rank r's input goes to element r * input.numel() and on. `input` may be this
  /// rank's part of `output`.
  virtual std::shared_ptr<Work> start_all_gather(const at::Tensor& output, const at::Tensor& input,
                                                 std::string_view subject) = 0;

  /// input: size() * output.numel() elements. Rank r gets the reduction of all ranks' r-th part. `input` may be overwritten.
  virtual std::shared_ptr<Work> start_reduce_scatter(const at::Tensor& output,
                                                     const at::Tensor& input, ReduceOp op,
                                                     std::string_view subject) = 0;

  virtual std::shared_ptr<Work> start_all_reduce(const at::Tensor& tensor, ReduceOp op,
                                                 std::string_view subject) = 0;

  /// `root` is a rank of this group.
  virtual std::shared_ptr<Work> start_broadcast(const at::Tensor& tensor, int root,
                                                std::string_view subject) = 0;

  /// True if several all-gathers or reduce-scatters can be launched as one (NCCL group calls). Otherwise callers pack tensors
  /// into one buffer.
  virtual bool launches_batches() const { return false; }

  /// If `launches_batches()`: tensors with fewer bytes than this are cheaper when packed together. 0: none are.
  virtual int64_t packs_below() const { return 0; }

  /// True if `Work::wait` makes the device's current stream wait, and never the host. Work after a collective can then be
  /// queued at once.
  virtual bool waits_in_streams() const { return false; }

  /// One launch for all pairs (outputs[i], inputs[i]), each as in `start_all_gather`.
  /// Throws StateError unless `launches_batches()`.
  virtual std::shared_ptr<Work> start_all_gather_batch(std::span<const at::Tensor> outputs,
                                                       std::span<const at::Tensor> inputs,
                                                       std::string_view subject);

  /// One launch for all pairs (outputs[i], inputs[i]), each as in `start_reduce_scatter`.
  virtual std::shared_ptr<Work> start_reduce_scatter_batch(std::span<const at::Tensor> outputs,
                                                           std::span<const at::Tensor> inputs,
                                                           ReduceOp op, std::string_view subject);

  /// Makes a group of some of this group's ranks, given as ranks of this group in the new order. A collective call of all
  /// ranks of this group, with the same arguments; ranks that are not members get nullptr. Throws UsageError for an empty
  /// list, and for a repeated or unknown rank.
  virtual std::shared_ptr<Communicator> split(std::span<const int> ranks,
                                              const std::string& name) = 0;

  /// Makes every pending and later collective of this group fail with CommError(reason); on the other ranks too, if the backend
  /// can do that. May be called from any thread.
  virtual void abort(const std::string& reason) = 0;

 protected:
  Communicator(int rank, std::vector<int> ranks, std::string name)
      : rank_(rank), ranks_(std::move(ranks)), name_(std::move(name)) {}

 private:
  int rank_;
  std::vector<int> ranks_;
  std::string name_;
};

}  // namespace fsdp
