#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp {

class Communicator;

enum class ReduceOp { kSum, kMax, kMin };

/// A collective under way. Threading: wait from the thread that will use the result.
class Work {
 public:
  virtual ~Work() = default;

  /// CPU tensors: returns when the result is there. CUDA tensors: makes the current stream wait
  /// for it and returns at once.
  /// Throws CommError naming the operation, what it was for and the group; on a timeout too.
  /// Calling it again is free, and throws again if the collective failed.
  virtual void wait() = 0;

  /// True once `wait` would not block the host. Asks, never waits.
  virtual bool is_completed() = 0;

  /// The next collective of `other` begins when this is done, and so does, on a device, what is queued on the current stream
  /// from now on. The host waits for nothing, nor does another stream; `wait` is called all the same. False: it cannot, and
  /// has done nothing. The answer is the same on all ranks, and whether this is done has no part in it.
  virtual bool hold_back(Communicator& /*other*/) { return false; }
};

/// A group of ranks that can run collectives together.
///
/// All ranks of a group make the same calls in the same order. `start_*` return before the
/// collective is done; tensors must stay alive and untouched until the Work is waited for.
/// All tensors are contiguous, of any dtype that the backend can send (all-gather and broadcast move bytes:
/// any dtype at all), and on the group's device type. CUDA: the collective starts after what is
/// already queued on the current stream.
///
/// `subject` says what a collective is for, in a user's words (the name of a parameter group);
/// it appears in errors, logs and recordings and is copied where it is kept.
///
/// Every `start_*` throws UsageError if sizes or dtypes do not fit, CommError if the launch fails.
/// Not thread-safe: one thread at a time.
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  virtual ~Communicator() = default;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  /// A unique name on this process, such as "world" or "shard[0,1]".
  const std::string& name() const { return name_; }
  /// The group's members as ranks of the world it was split from, in group order.
  const std::vector<int>& ranks() const { return ranks_; }
  /// Where tensors live unless the user asks for something else: CPU, or CUDA for NCCL.
  virtual c10::DeviceType device_type() const { return c10::DeviceType::CPU; }
  /// Short name of what carries the bytes: "gloo", "nccl", "threads", "single", "simulated"...
  virtual std::string backend() const = 0;

  /// output: size() * input.numel() elements; rank r's input starts at r * input.numel().
  /// `input` may be the rank's own piece of `output`.
  virtual std::shared_ptr<Work> start_all_gather(const at::Tensor& output, const at::Tensor& input,
                                                 std::string_view subject) = 0;

  /// input: size() * output.numel() elements. Rank r receives the reduction of everyone's r-th piece.
  /// `input` may be overwritten.
  virtual std::shared_ptr<Work> start_reduce_scatter(const at::Tensor& output,
                                                     const at::Tensor& input, ReduceOp op,
                                                     std::string_view subject) = 0;

  virtual std::shared_ptr<Work> start_all_reduce(const at::Tensor& tensor, ReduceOp op,
                                                 std::string_view subject) = 0;

  /// `root` is a rank of this group.
  virtual std::shared_ptr<Work> start_broadcast(const at::Tensor& tensor, int root,
                                                std::string_view subject) = 0;

  /// True if several all-gathers or reduce-scatters can be launched as one (NCCL group calls):
  /// then large tensors travel straight from place to place. Where false, callers pack.
  virtual bool launches_batches() const { return false; }

  /// Only where `launches_batches()`: pieces shorter than this many bytes cost less packed together
  /// into one than each in a place of its own. 0: never.
  virtual int64_t packs_below() const { return 0; }

  /// True if `Work::wait` lets the current stream of the device wait, and never the host for the device: then all that
  /// follows a collective can be queued at once.
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

  /// Makes a group of some of this group's ranks (given as ranks of this group, in the new order).
  /// Every rank of this group calls it with the same arguments, in the same order; ranks that are
  /// not members get nullptr. Throws UsageError for an empty, repeated or unknown rank.
  virtual std::shared_ptr<Communicator> split(std::span<const int> ranks,
                                              const std::string& name) = 0;

  /// Makes every pending and later collective of this group fail with CommError(reason), here and,
  /// as far as the backend can, on the other ranks. Safe to call from any thread.
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
