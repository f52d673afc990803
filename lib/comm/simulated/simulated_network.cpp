#include "fsdp/simulated_network.hpp"

#include <algorithm>
#include <set>

#include "base/require.hpp"
#include "comm/checks.hpp"
#include "comm/failure_flag.hpp"
#include "comm/simulated/simulated_link.hpp"
#include "comm/threads/local_reduce.hpp"
#include "comm/work.hpp"

namespace fsdp {
namespace {

using checks::Devices;
/// What the communicators of one network share.
struct Shared {
  explicit Shared(const SimulatedNetwork& network)
      : clock(network.clock ? network.clock : real_clock()), within_nodes(clock), between_nodes(clock) {}

  std::shared_ptr<SimulatedClock> clock;
  SimulatedLink within_nodes, between_nodes;
};

/// A group's collectives in time.
class Carrier {
 public:
  Carrier(std::shared_ptr<Shared> shared, const SimulatedNetwork& network, const std::vector<int>& ranks)
      : shared_(std::move(shared)), log_(network.log), ranks_(ranks.size()) {
    std::set<int> nodes;
    for (const int rank : ranks) nodes.insert(network.nodes.ranks > 0 ? rank / network.nodes.ranks : 0);
    nodes_ = nodes.size();
    link_ = nodes_ > 1 ? &shared_->between_nodes : &shared_->within_nodes;
    queue_ = link_->add_queue();
    const auto between = static_cast<double>(nodes_ - 1), within = static_cast<double>(ranks_ - nodes_);
    launch_us_ = network.launch_us;
    latency_us_ = within * network.latency_us + between * network.nodes.latency_us;
    bandwidth_ = network.bandwidth_gb_per_s;
    if (nodes_ > 1 && network.nodes.bandwidth_gb_per_s > 0) {
      const double out = network.nodes.bandwidth_gb_per_s * static_cast<double>(ranks_ / nodes_);
      bandwidth_ = bandwidth_ > 0 ? std::min(bandwidth_, out) : out;
    }
  }

  bool is_free() const { return launch_us_ == 0 && latency_us_ == 0 && bandwidth_ == 0; }
  SimulatedLink& link() const { return *link_; }

  std::shared_ptr<SimulatedLink::Transfer> start(int64_t bytes, int passes,
                                                 std::shared_ptr<const SimulatedLink::Transfer> behind) const {
    const auto ranks = static_cast<double>(ranks_);
    const double steps = passes * (ranks - 1);
    // 1 GB/s is a byte a nanosecond.
    const double sending_ns = bandwidth_ > 0 ? steps * static_cast<double>(bytes) / ranks / bandwidth_ : 0;
    return link_->start(queue_, 1e3 * (launch_us_ + passes * latency_us_), sending_ns, std::move(behind));
  }

  void note(const SimulatedLink::Transfer& transfer, const CollectiveInfo& info, int64_t start_ns) const {
    if (!log_) return;
    log_->push_back({.operation = info.operation,
                     .subject = info.subject,
                     .group = info.group,
                     .bytes = info.bytes,
                     .alone_us = 1e-3 * (transfer.latency_ns + transfer.sending_ns),
                     .start_ns = start_ns,
                     .begin_ns = transfer.begin_ns,
                     .end_ns = transfer.end_ns});
  }

  int64_t now_ns() const { return shared_->clock->now_ns(); }

 private:
  std::shared_ptr<Shared> shared_;
  std::shared_ptr<std::vector<SimulatedTransfer>> log_;
  SimulatedLink* link_ = nullptr;
  size_t ranks_, nodes_ = 1, queue_ = 0;
  double launch_us_ = 0, latency_us_ = 0, bandwidth_ = 0;
};

class TimedWork final : public Work {
 public:
  TimedWork(const Carrier& carrier, std::shared_ptr<SimulatedLink::Transfer> transfer,
            std::shared_ptr<const FailureFlag> failure, CollectiveInfo info)
      : carrier_(carrier),
        transfer_(std::move(transfer)),
        start_ns_(carrier.now_ns()),
        failure_(std::move(failure)),
        info_(std::move(info)) {}

  void wait() override {
    if (arrived_) return;
    if (failure_->is_set()) info_.fail(failure_->reason());
    carrier_.link().wait(*transfer_);
    if (failure_->is_set()) info_.fail(failure_->reason());
    arrived_ = true;
    carrier_.note(*transfer_, info_, start_ns_);
  }

  bool is_completed() override { return arrived_ || failure_->is_set() || carrier_.link().is_done(*transfer_); }
  bool hold_back(Communicator& other) override;

 private:
  const Carrier carrier_;
  std::shared_ptr<SimulatedLink::Transfer> transfer_;
  int64_t start_ns_;
  std::shared_ptr<const FailureFlag> failure_;
  CollectiveInfo info_;
  bool arrived_ = false;
};

class SimulatedCommunicator final : public Communicator {
 public:
  SimulatedCommunicator(const SimulatedNetwork& network, std::shared_ptr<Shared> shared, int rank,
                        std::vector<int> ranks, std::string name)
      : Communicator(rank, std::move(ranks), std::move(name)),
        network_(network),
        shared_(std::move(shared)),
        carrier_(shared_, network_, this->ranks()) {}

  std::string backend() const override { return "simulated"; }
  bool launches_batches() const override { return network_.launches_batches; }
  int64_t packs_below() const override { return network_.packs_below; }

  std::shared_ptr<Work> start_all_gather(const at::Tensor& output, const at::Tensor& input,
                                         std::string_view subject) override {
    checks::all_gather(*this, output, input, subject, Devices::kAny);
    move_gathered(output, input);
    return start("all_gather", subject, bytes_of(output), /*passes=*/1);
  }

  std::shared_ptr<Work> start_reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                             ReduceOp /*op*/, std::string_view subject) override {
    checks::reduce_scatter(*this, output, input, subject, Devices::kAny);
    move_scattered(output, input);
    return start("reduce_scatter", subject, bytes_of(input), /*passes=*/1);
  }

  std::shared_ptr<Work> start_all_reduce(const at::Tensor& tensor, ReduceOp /*op*/,
                                         std::string_view subject) override {
    checks::all_reduce(*this, tensor, subject, Devices::kAny);
    // A ring reduces in one pass and hands the result round in a second.
    return start("all_reduce", subject, bytes_of(tensor), /*passes=*/2);
  }

  std::shared_ptr<Work> start_broadcast(const at::Tensor& tensor, int root,
                                        std::string_view subject) override {
    checks::broadcast(*this, tensor, root, subject, Devices::kAny);
    return start("broadcast", subject, bytes_of(tensor), /*passes=*/1);
  }

  std::shared_ptr<Work> start_all_gather_batch(std::span<const at::Tensor> outputs,
                                               std::span<const at::Tensor> inputs,
                                               std::string_view subject) override {
    if (!launches_batches()) return Communicator::start_all_gather_batch(outputs, inputs, subject);
    checks::all_gather_batch(*this, outputs, inputs, subject, Devices::kAny);
    int64_t bytes = 0;
    for (size_t i = 0; i < outputs.size(); ++i) {
      move_gathered(outputs[i], inputs[i]);
      bytes += bytes_of(outputs[i]);
    }
    return start("all_gather", subject, bytes, /*passes=*/1);
  }

  std::shared_ptr<Work> start_reduce_scatter_batch(std::span<const at::Tensor> outputs,
                                                   std::span<const at::Tensor> inputs, ReduceOp op,
                                                   std::string_view subject) override {
    if (!launches_batches())
      return Communicator::start_reduce_scatter_batch(outputs, inputs, op, subject);
    checks::reduce_scatter_batch(*this, outputs, inputs, subject, Devices::kAny);
    int64_t bytes = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      move_scattered(outputs[i], inputs[i]);
      bytes += bytes_of(inputs[i]);
    }
    return start("reduce_scatter", subject, bytes, /*passes=*/1);
  }

  std::shared_ptr<Communicator> split(std::span<const int> ranks,
                                      const std::string& name) override {
    SplitPlan plan = plan_split(*this, ranks, name);
    if (plan.rank < 0) return nullptr;
    return std::make_shared<SimulatedCommunicator>(network_, shared_, plan.rank, std::move(plan.world_ranks),
                                                   std::move(plan.name));
  }

  void abort(const std::string& reason) override { failure_->set(reason); }

  const SimulatedLink& link() const { return carrier_.link(); }
  void hold_next_behind(std::shared_ptr<const SimulatedLink::Transfer> transfer) { behind_ = std::move(transfer); }

 private:
  static int64_t bytes_of(const at::Tensor& tensor) {
    return static_cast<int64_t>(tensor.nbytes());
  }

  void move_gathered(const at::Tensor& output, const at::Tensor& input) const {
    if (network_.moves_own_bytes) copy_to_piece(output, rank(), input);
  }

  void move_scattered(const at::Tensor& output, const at::Tensor& input) const {
    if (network_.moves_own_bytes) copy_from_piece(output, input, rank());
  }

  std::shared_ptr<Work> start(const char* operation, std::string_view subject, int64_t bytes,
                              int passes) {
    failure_->check(operation, subject, *this);
    // A free network asks no clock and allocates nothing: it serves to count the host's own work.
    if (carrier_.is_free()) return completed_work();
    return std::make_shared<TimedWork>(carrier_, carrier_.start(bytes, passes, std::exchange(behind_, {})), failure_,
                                       CollectiveInfo(operation, subject, *this, bytes));
  }

  const SimulatedNetwork network_;
  const std::shared_ptr<Shared> shared_;
  const Carrier carrier_;
  std::shared_ptr<FailureFlag> failure_ = std::make_shared<FailureFlag>();
  std::shared_ptr<const SimulatedLink::Transfer> behind_;  // of the next collective
};

bool TimedWork::hold_back(Communicator& other) {
  auto* simulated = dynamic_cast<SimulatedCommunicator*>(&other);
  // Links follow the clock each for itself.
  if (simulated == nullptr || &simulated->link() != &carrier_.link()) return false;
  simulated->hold_next_behind(transfer_);
  return true;
}

}  // namespace

std::shared_ptr<Communicator> simulated_network(const SimulatedNetwork& network) {
  require(network.world_size >= 1,
          "simulated_network: expected at least one rank, found world_size {}", network.world_size);
  require(network.rank >= 0 && network.rank < network.world_size,
          "simulated_network: expected a rank from 0 to {}, found {}", network.world_size - 1,
          network.rank);
  require(network.latency_us >= 0 && network.bandwidth_gb_per_s >= 0 && network.launch_us >= 0,
          "simulated_network: latency and bandwidth must not be negative, found {} us, {} GB/s and {} us a launch",
          network.latency_us, network.bandwidth_gb_per_s, network.launch_us);
  require(network.nodes.ranks >= 0 && network.nodes.latency_us >= 0 && network.nodes.bandwidth_gb_per_s >= 0,
          "simulated_network: ranks, latency and bandwidth of a node must not be negative, found {}, {} us and {} GB/s",
          network.nodes.ranks, network.nodes.latency_us, network.nodes.bandwidth_gb_per_s);
  std::vector<int> ranks(network.world_size);
  for (int rank = 0; rank < network.world_size; ++rank) ranks[rank] = rank;
  return std::make_shared<SimulatedCommunicator>(network, std::make_shared<Shared>(network), network.rank,
                                                 std::move(ranks), "world");
}

}  // namespace fsdp
