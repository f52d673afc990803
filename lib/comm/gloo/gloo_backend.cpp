#include "comm/gloo/gloo_backend.hpp"

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "base/environment.hpp"
#include "base/stable_hash.hpp"
#include "comm/gloo/gloo_works.hpp"
#include "comm/peer_connections.hpp"

namespace fsdp {
namespace {

using c10d::ProcessGroupGloo;

class PairwiseGloo final : public ProcessGroupGloo, public PeerLinks, public HasPeerConnections {
 public:
  PairwiseGloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
               c10::intrusive_ptr<Options> options, bool connects_late)
      : ProcessGroupGloo(store, rank, size, std::move(options)), connects_late_(connects_late) {}

  /// The base waits for its workers, but only when this part of the object is gone, which their
  /// works use; so they are waited for here.
  ~PairwiseGloo() override {
    std::unique_lock lock(mutex_);
    while (!is_idle_.wait_for(lock, kMoment, [this] { return running_.empty(); })) stop_stuck();
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& opts) override {
    std::vector<at::Tensor> outputs = {output}, inputs = {input};
    return allgather_into_tensor_coalesced(outputs, inputs, opts);
  }

  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& opts) override {
    return launch(c10::make_intrusive<GlooAllGather>(
        next_place(opts.timeout, fingerprint(/*operation=*/1, outputs)), *this, outputs, inputs));
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    std::vector<at::Tensor> outputs = {output}, inputs = {input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  }

  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& opts) override {
    const auto op = opts.reduceOp.op_ == c10d::ReduceOp::MAX   ? ReduceOp::kMax
                    : opts.reduceOp.op_ == c10d::ReduceOp::MIN ? ReduceOp::kMin
                                                               : ReduceOp::kSum;
    return launch(c10::make_intrusive<GlooReduceScatter>(
        next_place(opts.timeout, fingerprint(/*operation=*/2, outputs)), *this, outputs, inputs, op));
  }

  /// Wakes whoever waits for a peer in one of the works above, who then throws. To be called from any thread.
  void abort() override {
    std::lock_guard lock(mutex_);
    is_aborted_ = true;
    for (auto* work : running_) work->stop();
  }

  // Note [How gloo lets go of its peers]
  // Gloo's closeConnections wakes nobody on this rank. But a receive that times out ends all connections of its context, and
  // wakes whoever waits for a message on one of them. A peer that has gone already fails the receive itself, so each is tried.
  void disconnect() noexcept override {
    if (connects_late_) return;  // it would first connect to ranks that it has never talked to
    for (size_t context = 0; context < contexts_.size(); ++context)
      for (int step = 1; step < getSize(); ++step) {
        try {
          receive_nothing((getRank() + step) % getSize(), static_cast<int>(context))->wait(std::chrono::milliseconds(1));
        } catch (const std::exception&) {
          // as intended
        }
      }
  }

  void fail_stuck_waits() noexcept override {
    std::lock_guard lock(mutex_);
    stop_stuck();
  }

  void note_finished(GlooExchange& work) noexcept override {
    std::lock_guard lock(mutex_);
    std::erase(running_, &work);
    if (running_.empty()) is_idle_.notify_all();
  }

 private:
  // Note [Tags tell collectives apart]
  // Gloo ends the process when a message is longer than the buffer that waits for it. So the tag,
  // by which messages find each other, says what the collective is: where the ranks disagree, their
  // messages do not meet, both wait, and the schedule check can say in what they disagree.
  static int fingerprint(uint32_t operation, const std::vector<at::Tensor>& tensors) {
    uint64_t hash = operation;
    for (const auto& tensor : tensors) hash = mixed_hash(hash, tensor.nbytes());
    return static_cast<int>(hash >> 49);  // 15 bits, the best mixed ones
  }

  WorkPlace next_place(std::chrono::milliseconds timeout, int fingerprint) {
    // Tags of point-to-point messages live apart from those of gloo's own collectives.
    const int tag = (next_tag_ << 15) | fingerprint;
    next_tag_ = (next_tag_ + 1) % kTags;
    return {.context = getContext(tag),
            .rank = getRank(),
            .size = getSize(),
            .tag = tag,
            .sequence = ++seq_,
            .timeout = timeout == c10d::kUnsetTimeout ? getOptions()->timeout : timeout};
  }

  template <class GlooWork>
  c10::intrusive_ptr<c10d::Work> launch(c10::intrusive_ptr<GlooWork> work) {
    work->start();
    {
      std::lock_guard lock(mutex_);
      running_.push_back(work.get());
      if (is_aborted_) work->stop();  // it came between
    }
    enqueue(work);
    return work;
  }

  c10::intrusive_ptr<c10d::Work> send_to(const at::Tensor& tensor, int peer, int tag) override {
    std::vector<at::Tensor> one = {tensor};
    return send(one, peer, tag);
  }

  c10::intrusive_ptr<c10d::Work> receive_from(const at::Tensor& tensor, int peer,
                                              int tag) override {
    std::vector<at::Tensor> one = {tensor};
    return recv(one, peer, tag);
  }

  static constexpr auto kMoment = std::chrono::milliseconds(200);
  // The second, and those after it, are never given by `next_place`.
  static constexpr int kTags = 0xFFFF, kTagOfNoMessage = kTags << 15;

  c10::intrusive_ptr<c10d::Work> receive_nothing(int peer, int context) {
    std::vector<at::Tensor> nothing_sent = {at::empty({1}, at::kByte)};
    return recv(nothing_sent, peer, kTagOfNoMessage + context);
  }

  /// Stops the works that wait for a peer in vain. The lock is held.
  void stop_stuck() noexcept {
    for (auto* work : running_) work->stop_if_stuck([this](int peer, int tag) { return is_gone(peer, tag); });
  }

  /// A receive that has been aborted waits no moment. It throws if the connection has ended.
  bool is_gone(int peer, int tag) {
    const int contexts = static_cast<int>(contexts_.size());
    try {
      int context = 0;  // the one of the tag: gloo takes them in turns
      while ((kTagOfNoMessage + context) % contexts != tag % contexts) ++context;
      auto& probe = probes_[{peer, context}];
      if (!probe) probe = receive_nothing(peer, context);
      probe->abort();
      probe->wait();
      return false;
    } catch (const std::exception&) {
      return true;
    }
  }

  const bool connects_late_;
  std::mutex mutex_;
  std::condition_variable is_idle_;
  std::vector<GlooExchange*> running_;  ///< queued or under way: gloo's queue keeps them alive
  std::map<std::pair<int, int>, c10::intrusive_ptr<c10d::Work>> probes_;  ///< by peer and context; wait for nothing
  bool is_aborted_ = false;
  int next_tag_ = 0;
};

std::vector<std::string> split_at_commas(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t at = 0; at <= text.size();) {
    const size_t stop = std::min(text.find(',', at), text.size());
    if (stop > at) parts.push_back(text.substr(at, stop - at));
    at = stop + 1;
  }
  return parts;
}

/// gloo writes to sockets as to files: when a rank has gone, SIGPIPE would end this process before it can say so. Whoever
/// handles the signal himself goes on doing it.
void ignore_broken_pipes() {
  struct sigaction now {};
  const bool is_default = sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL;
  if (is_default) signal(SIGPIPE, SIG_IGN);
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size,
                                                    const GlooOptions& options) {
  ignore_broken_pipes();
  auto gloo = ProcessGroupGloo::Options::create(options.timeout);
  gloo->threads = options.threads;
  const bool lazy = c10d::getDefaultGlooLazyInit();
  const auto interfaces = environment::gloo_interfaces();
  if (interfaces)
    for (const std::string& name : split_at_commas(*interfaces))
      gloo->devices.push_back(ProcessGroupGloo::createDeviceForInterface(name, lazy));
  else if (options.loopback)
    gloo->devices.push_back(ProcessGroupGloo::createDeviceForHostname("127.0.0.1", lazy));
  else
    gloo->devices.push_back(ProcessGroupGloo::createDefaultDevice(lazy));
  auto backend = c10::make_intrusive<PairwiseGloo>(store, rank, size, std::move(gloo), lazy);
  // A rank that is connected may go on, and soon let go of the group. To one that is still connecting that looks as if the
  // other had crashed. A peer that stops between the two is waited for as long as one that never connects.
  if (!lazy && size > 1) backend->barrier()->wait();
  return backend;
}

}  // namespace fsdp
