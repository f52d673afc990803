#include <atomic>
#include <chrono>
#include <exception>
#include <optional>
#include <thread>

#include <fmt/format.h>

#include "base/require.hpp"
#include "comm/checks.hpp"
#include "comm/threads/thread_board.hpp"
#include "comm/threads/thread_ranks.hpp"
#include "comm/total_bytes.hpp"
#include "comm/watch/group_place.hpp"
#include "fsdp/process_group.hpp"

namespace fsdp {
namespace {

class ThreadWork final : public Work {
 public:
  ThreadWork(std::shared_ptr<ThreadBoard> board, std::shared_ptr<ThreadMeeting> meeting,
             CollectiveInfo info)
      : board_(std::move(board)), meeting_(std::move(meeting)), info_(std::move(info)) {}

  void wait() override {
    while (!wait_briefly()) {
    }
  }
  bool wait_briefly() override {
    if (!deadline_) deadline_ = std::chrono::steady_clock::now() + board_->timeout();
    return board_->wait_briefly(*meeting_, info_, *deadline_);
  }
  bool is_completed() override { return board_->is_settled(*meeting_); }

 private:
  std::shared_ptr<ThreadBoard> board_;
  std::shared_ptr<ThreadMeeting> meeting_;
  CollectiveInfo info_;
  std::optional<std::chrono::steady_clock::time_point> deadline_;  // from the first wait on
};

std::vector<at::Tensor> copy_of(std::span<const at::Tensor> tensors) {
  return {tensors.begin(), tensors.end()};
}

/// One rank's end of a ThreadBoard.
class ThreadCommunicator final : public Communicator, public HasNoticeBoard {
 public:
  ThreadCommunicator(std::shared_ptr<ThreadBoard> board, int rank, std::shared_ptr<GroupPlace> place)
      : Communicator(rank, board->world_ranks(), board->name()), board_(std::move(board)), place_(std::move(place)) {}

  std::string backend() const override { return "threads"; }
  bool launches_batches() const override { return board_->launches_batches(); }
  int64_t packs_below() const override { return board_->packs_below(); }

  std::shared_ptr<Work> start_all_gather(const at::Tensor& output, const at::Tensor& input,
                                         std::string_view subject) override {
    checks::all_gather(*this, output, input, subject);
    ThreadCall call{.operation = "all_gather", .outputs = {output}, .inputs = {input}};
    return start(std::move(call), subject, total_bytes({&output, 1}));
  }

  std::shared_ptr<Work> start_reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                             ReduceOp op, std::string_view subject) override {
    checks::reduce_scatter(*this, output, input, subject);
    ThreadCall call{
        .operation = "reduce_scatter", .op = op, .outputs = {output}, .inputs = {input}};
    return start(std::move(call), subject, total_bytes({&input, 1}));
  }

  std::shared_ptr<Work> start_all_reduce(const at::Tensor& tensor, ReduceOp op,
                                         std::string_view subject) override {
    checks::all_reduce(*this, tensor, subject);
    ThreadCall call{.operation = "all_reduce", .op = op, .outputs = {tensor}};
    return start(std::move(call), subject, total_bytes({&tensor, 1}));
  }

  std::shared_ptr<Work> start_broadcast(const at::Tensor& tensor, int root,
                                        std::string_view subject) override {
    checks::broadcast(*this, tensor, root, subject);
    ThreadCall call{.operation = "broadcast", .root = root, .outputs = {tensor}};
    return start(std::move(call), subject, total_bytes({&tensor, 1}));
  }

  std::shared_ptr<Work> start_all_gather_batch(std::span<const at::Tensor> outputs,
                                               std::span<const at::Tensor> inputs,
                                               std::string_view subject) override {
    if (!launches_batches()) return Communicator::start_all_gather_batch(outputs, inputs, subject);
    checks::all_gather_batch(*this, outputs, inputs, subject);
    ThreadCall call{
        .operation = "all_gather", .outputs = copy_of(outputs), .inputs = copy_of(inputs)};
    return start(std::move(call), subject, total_bytes(outputs));
  }

  std::shared_ptr<Work> start_reduce_scatter_batch(std::span<const at::Tensor> outputs,
                                                   std::span<const at::Tensor> inputs, ReduceOp op,
                                                   std::string_view subject) override {
    if (!launches_batches())
      return Communicator::start_reduce_scatter_batch(outputs, inputs, op, subject);
    checks::reduce_scatter_batch(*this, outputs, inputs, subject);
    ThreadCall call{.operation = "reduce_scatter",
                    .op = op,
                    .outputs = copy_of(outputs),
                    .inputs = copy_of(inputs)};
    return start(std::move(call), subject, total_bytes(inputs));
  }

  std::shared_ptr<Communicator> split(std::span<const int> ranks,
                                      const std::string& name) override {
    const SplitPlan plan = plan_split(*this, ranks, name);
    auto board = board_->child(next_split_++, rank(), plan.name, plan.world_ranks);
    if (plan.rank < 0) return nullptr;
    return std::make_shared<ThreadCommunicator>(std::move(board), plan.rank, place_->below(name, plan.world_ranks));
  }

  void abort(const std::string& reason) override { board_->abort(reason); }
  std::shared_ptr<NoticeBoard> notice_board() override { return board_->notices(); }
  std::shared_ptr<GroupPlace> place() override { return place_; }

 private:
  std::shared_ptr<Work> start(ThreadCall call, std::string_view subject, int64_t bytes) {
    CollectiveInfo info(call.operation, subject, *this, bytes);
    call.subject = subject;
    auto meeting = board_->arrive(rank(), next_call_++, std::move(call), info);
    return std::make_shared<ThreadWork>(board_, std::move(meeting), std::move(info));
  }

  std::shared_ptr<ThreadBoard> board_;
  std::shared_ptr<GroupPlace> place_;
  uint64_t next_call_ = 0;
  uint64_t next_split_ = 0;
};

thread_local bool is_rank_thread = false;

/// The exception that ended the ranks: the first one thrown, since the others follow from it.
class FirstError {
 public:
  void keep(std::exception_ptr error) {
    std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
  }
  void rethrow() {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
};

std::string what_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace

bool runs_as_thread_rank() { return is_rank_thread; }

void run_ranks(int world_size, const std::function<void(std::shared_ptr<Communicator>)>& rank_main,
               const ThreadRanksOptions& options) {
  require(world_size >= 1, "run_ranks: expected at least one rank, found world_size {}",
          world_size);
  auto world = std::make_shared<ThreadWorld>(options.timeout);
  std::vector<int> ranks(world_size);
  for (int rank = 0; rank < world_size; ++rank) ranks[rank] = rank;
  auto board = std::make_shared<ThreadBoard>(world, "world", ranks, options.timeout,
                                             options.launches_batches, options.packs_below);
  world->add(board);
  FirstError first_error;
  const auto run_one = [&](int rank) {
    is_rank_thread = true;
    try {
      rank_main(std::make_shared<ThreadCommunicator>(board, rank, std::make_shared<GroupPlace>()));
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      first_error.keep(error);
      world->abort(fmt::format("rank {} ended with: {}", rank, what_of(error)));
    }
    world->rank_ended(rank);
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) threads.emplace_back(run_one, rank);
  for (std::thread& thread : threads) thread.join();
  first_error.rethrow();
}

}  // namespace fsdp
