#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <vector>

#include "comm/gloo/waited_message.hpp"
#include "fsdp/communicator.hpp"

namespace fsdp {

// Note [Pairwise exchange]
// Gloo's own all-gather of one tensor gathers into a buffer of its own and copies out of it, and
// its reduce-scatter is an all-reduce of a copy of the input. Both cost more in copies than
// loopback costs in transfers. So the two collectives that carry nearly all of FSDP's bytes are
// made of point-to-point messages here: every rank sends each peer what that peer needs, straight
// from the caller's buffer, and receives straight into it (all-gather), or into a few chunks that
// are added up while the next ones arrive (reduce-scatter). Messages start when the collective is
// started; one of gloo's worker threads waits for them and adds. Several tensors travel as one
// collective, so that nothing needs to be packed.

class GlooExchange;

/// How a work talks to its peers, and to the group that started it.
class PeerLinks {
 public:
  /// The work's `run` is over: it holds no tensors any more and may be destroyed at any time.
  virtual void note_finished(GlooExchange& work) noexcept = 0;
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
///
/// It lets go of its tensors before it is seen to be complete: gloo's worker drops the work itself
/// only some time later, and until then a step's peak of memory would depend on chance.
class GlooExchange : public c10d::ProcessGroupGloo::AsyncWork {
 public:
  ~GlooExchange() override;
  /// Starts the messages.
  void start();
  void run() final;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) final;
  /// c10d's flight recorder alone asks for these, and may ask when they are gone: so they return none.
  const std::vector<at::Tensor> getInputTensors() override { return {}; }
  const std::vector<at::Tensor> getOutputTensors() override { return {}; }
  /// Wakes `run`, which then throws.
  void stop();
  /// Wakes `run`, which then throws, if it waits for a message that no longer comes or goes: see Note [Messages cut in two].
  void stop_if_stuck(const std::function<bool(int peer, int tag)>& is_gone);

 protected:
  using Tensors = std::vector<at::Tensor>;
  /// What is under way between this rank and another one.
  struct Message {
    c10::intrusive_ptr<c10d::Work> work;
    int peer;
  };
  /// One output for each input.
  GlooExchange(const WorkPlace& place, PeerLinks& links, const Tensors& outputs,
               const Tensors& inputs, c10d::OpType type, const char* title);

  /// Returns the `step`-th peer, counted from this rank on, so that not all ranks send to rank 0 first.
  int peer(int step) const { return (place_.rank + step) % place_.size; }
  void send(const at::Tensor& tensor, int to);
  /// Messages from one peer arrive in the order in which they were sent.
  Message receive(const at::Tensor& tensor, int from);
  /// Throws CommError with the peer's rank.
  void wait_for(const Message& message, const char* direction = "from");
  void wait_for_sends();
  virtual void post() = 0;
  /// Returns when everything has arrived and is in its place.
  virtual void exchange() = 0;
  virtual void drop_tensors();

  const WorkPlace place_;
  Tensors outputs_, inputs_;  ///< 1-D

 private:
  PeerLinks& links_;  // the group, which waits for its workers before it goes
  std::vector<Message> sends_;
  // Also held once by whoever takes the work or its error over from another thread: c10d has locks of
  // its own for that, but ThreadSanitizer does not see them.
  std::mutex mutex_;
  std::vector<c10::intrusive_ptr<c10d::Work>> started_;  ///< to be aborted by `stop`
  bool stopped_ = false;
  WaitedMessage waits_for_;
};

class GlooAllGather final : public GlooExchange {
 public:
  GlooAllGather(const WorkPlace& place, PeerLinks& links, const Tensors& outputs,
                const Tensors& inputs);

 protected:
  void post() override;
  void exchange() override;
  void drop_tensors() override;

 private:
  std::vector<Message> receives_;
};

class GlooReduceScatter final : public GlooExchange {
 public:
  /// All of one dtype.
  GlooReduceScatter(const WorkPlace& place, PeerLinks& links, const Tensors& outputs,
                    const Tensors& inputs, ReduceOp op);

 protected:
  void post() override;
  void exchange() override;
  void drop_tensors() override;

 private:
  /// A part of one output, and of every piece of its input.
  struct Chunk {
    size_t tensor;
    int64_t start;
    int64_t numel;
  };
  at::Tensor own_part(const Chunk& chunk, int of_rank) const;
  at::Tensor arrival(size_t index, int step) const;
  void post_receives(size_t index);
  void add_up(size_t index);

  const ReduceOp op_;
  std::vector<Chunk> chunks_;
  at::Tensor arrivals_;  ///< [chunks in flight, peers, elements of the longest chunk]
  std::vector<std::vector<Message>> receives_;  ///< [chunks in flight][peers]
};

}  // namespace fsdp
