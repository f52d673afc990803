#include "fsdp/simulated_network.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/require.hpp"
#include "comm/checks.hpp"
#include "comm/failure_flag.hpp"
#include "comm/local_reduce.hpp"
#include "comm/work.hpp"

namespace fsdp {
namespace {

using checks::Devices;
using Clock = std::chrono::steady_clock;

/// Sleeping is late by up to this much, so the last stretch is spun.
constexpr auto kSpin = std::chrono::microseconds(50);

/// Done at a moment that is known when it starts.
class TimedWork final : public Work {
 public:
  TimedWork(Clock::time_point done, std::shared_ptr<const FailureFlag> failure, CollectiveInfo info)
      : done_(done), failure_(std::move(failure)), info_(std::move(info)) {}

  void wait() override {
    if (arrived_) return;
    if (failure_->is_set()) info_.fail(failure_->reason());
    if (Clock::now() + kSpin < done_) std::this_thread::sleep_until(done_ - kSpin);
    while (Clock::now() < done_) {
    }
    if (failure_->is_set()) info_.fail(failure_->reason());
    arrived_ = true;
  }

  bool is_completed() override { return arrived_ || failure_->is_set() || Clock::now() >= done_; }

 private:
  Clock::time_point done_;
  std::shared_ptr<const FailureFlag> failure_;
  CollectiveInfo info_;
  bool arrived_ = false;
};

class SimulatedCommunicator final : public Communicator {
 public:
  SimulatedCommunicator(const SimulatedNetwork& network, int rank, std::vector<int> ranks,
                        std::string name)
      : Communicator(rank, std::move(ranks), std::move(name)), network_(network) {}

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
    return std::make_shared<SimulatedCommunicator>(network_, plan.rank, std::move(plan.world_ranks),
                                                   std::move(plan.name));
  }

  void abort(const std::string& reason) override { failure_->set(reason); }

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
    if (network_.latency_us == 0 && network_.bandwidth_gb_per_s == 0) return completed_work();
    const double steps = passes * (size() - 1);
    double microseconds = steps * network_.latency_us;
    if (network_.bandwidth_gb_per_s > 0)  // 1 GB/s is 1000 bytes a microsecond
      microseconds += steps * bytes / size() / (network_.bandwidth_gb_per_s * 1e3);
    const auto duration = std::chrono::duration<double, std::micro>(microseconds);
    free_at_ =
        std::max(free_at_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(duration);
    return std::make_shared<TimedWork>(free_at_, failure_,
                                       CollectiveInfo(operation, subject, *this, bytes));
  }

  const SimulatedNetwork network_;
  Clock::time_point free_at_{};  ///< when the collectives started so far will be done
  std::shared_ptr<FailureFlag> failure_ = std::make_shared<FailureFlag>();
};

}  // namespace

std::shared_ptr<Communicator> simulated_network(const SimulatedNetwork& network) {
  require(network.world_size >= 1,
          "simulated_network: expected at least one rank, found world_size {}", network.world_size);
  require(network.rank >= 0 && network.rank < network.world_size,
          "simulated_network: expected a rank from 0 to {}, found {}", network.world_size - 1,
          network.rank);
  require(network.latency_us >= 0 && network.bandwidth_gb_per_s >= 0,
          "simulated_network: latency and bandwidth must not be negative, found {} us and {} GB/s",
          network.latency_us, network.bandwidth_gb_per_s);
  std::vector<int> ranks(network.world_size);
  for (int rank = 0; rank < network.world_size; ++rank) ranks[rank] = rank;
  return std::make_shared<SimulatedCommunicator>(network, network.rank, std::move(ranks), "world");
}

}  // namespace fsdp
