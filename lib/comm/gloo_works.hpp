#pragma once

#include <atomic>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <vector>

#include "fsdp/communicator.hpp"

namespace fsdp {

// Note [Pairwise exchange]
// Gloo's own all-gather of one tensor gathers into a buffer of its own and copies out of it, and
// its reduce-scatter is an all-reduce of a copy of the input. Both cost more in copies than
// loopback costs in transfers. So the two collectives that carry nearly all of FSDP's bytes are
// made of point-to-point messages here: every rank sends each peer what that peer needs, straight
// from the caller's buffer, and receives straight into it (all-gather), or into a few chunks that
// are added up while the next ones arrive (reduce-scatter). Messages start when the collective is
// started; one of gloo's worker threads waits for them and adds.

/// How a work talks to its peers.
class PeerLinks {
 public:
  virtual c10::intrusive_ptr<c10d::Work> send_to(const at::Tensor& tensor, int peer, int tag) = 0;
  virtual c10::intrusive_ptr<c10d::Work> receive_from(const at::Tensor& tensor, int peer,
                                                      int tag) = 0;

 protected:
  ~PeerLinks() = default;
};

/// What one collective is given by its group.
struct WorkPlace {
  std::shared_ptr<::gloo::Context> context;
  int rank = 0;
  int size = 1;
  int tag = 0;  ///< the same on all ranks; messages between two ranks match in the order they start
  uint64_t sequence = 0;
  std::chrono::milliseconds timeout;
};

/// A collective made of messages. Threading: `post` by the caller, `run` by a worker of gloo,
/// `stop` by any thread.
class GlooExchange : public c10d::ProcessGroupGloo::AsyncWork {
 public:
  /// Starts the messages.
  virtual void post() = 0;
  /// Wakes `run`, which then throws.
  void stop();

  const std::vector<at::Tensor> getInputTensors() override { return {input_}; }
  const std::vector<at::Tensor> getOutputTensors() override { return {output_}; }

 protected:
  GlooExchange(const WorkPlace& place, PeerLinks& links, const at::Tensor& output,
               const at::Tensor& input, c10d::OpType type, const char* title);

  /// Peers from the next rank on, so that not all ranks send to rank 0 first.
  int peer(int step) const { return (place_.rank + step) % place_.size; }
  void send(const at::Tensor& tensor, int to);
  /// Messages from one peer arrive in the order in which they were sent.
  c10::intrusive_ptr<c10d::Work> receive(const at::Tensor& tensor, int from);
  void wait_for(const c10::intrusive_ptr<c10d::Work>& message);
  void wait_for_sends();

  const WorkPlace place_;
  const at::Tensor output_;  ///< 1-D
  const at::Tensor input_;   ///< 1-D

 private:
  PeerLinks& links_;  // the group, which waits for its workers before it goes
  std::vector<c10::intrusive_ptr<c10d::Work>> sends_;
  std::mutex mutex_;
  std::vector<c10::intrusive_ptr<c10d::Work>> started_;  ///< to be aborted by `stop`
  bool stopped_ = false;
};

class GlooAllGather final : public GlooExchange {
 public:
  GlooAllGather(const WorkPlace& place, PeerLinks& links, const at::Tensor& output,
                const at::Tensor& input);
  void post() override;
  void run() override;

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> receives_;
};

class GlooReduceScatter final : public GlooExchange {
 public:
  GlooReduceScatter(const WorkPlace& place, PeerLinks& links, const at::Tensor& output,
                    const at::Tensor& input, ReduceOp op);
  void post() override;
  void run() override;

 private:
  struct Range {
    int64_t start;
    int64_t numel;
  };
  /// The `index`-th chunk of the output, and of every piece of the input.
  Range chunk(int64_t index) const;
  void post_receives(int64_t index);
  void add_up(int64_t index);

  const ReduceOp op_;
  int64_t chunk_numel_ = 0;
  int64_t chunks_ = 0;
  at::Tensor arrivals_;  ///< [chunks in flight, peers, chunk_numel_]
  std::vector<std::vector<c10::intrusive_ptr<c10d::Work>>>
      receives_;  ///< [chunks in flight][peers]
};

}  // namespace fsdp
