#include "comm/threads/thread_board.hpp"

#include <c10/core/ScalarType.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "comm/threads/local_reduce.hpp"
#include "fsdp/error.hpp"

namespace fsdp {

void ThreadWorld::add(const std::shared_ptr<ThreadBoard>& board) {
  std::lock_guard lock(mutex_);
  boards_.push_back(board);
  for (const int rank : ended_) board->rank_ended(rank);
  if (!failure_.empty()) board->abort(failure_);
}

void ThreadWorld::abort(const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (failure_.empty()) failure_ = reason;
  for (const auto& weak : boards_)
    if (const auto board = weak.lock()) board->abort(reason);
}

void ThreadWorld::rank_ended(int world_rank) {
  std::lock_guard lock(mutex_);
  ended_.insert(world_rank);
  for (const auto& weak : boards_)
    if (const auto board = weak.lock()) board->rank_ended(world_rank);
}

std::string ThreadCall::signature() const {
  const auto& sized = inputs.empty() ? outputs : inputs;
  std::vector<std::string> sizes;
  for (const at::Tensor& tensor : sized)
    sizes.push_back(fmt::format("{} {}", tensor.numel(), c10::toString(tensor.scalar_type())));
  std::string detail;
  if (std::string_view(operation) == "broadcast")
    detail = fmt::format(" from rank {}", root);
  else if (std::string_view(operation) != "all_gather")
    detail = fmt::format(" ({})", op == ReduceOp::kSum   ? "sum"
                                  : op == ReduceOp::kMax ? "max"
                                                         : "min");
  return fmt::format("{}{} of [{}]", operation, detail, fmt::join(sizes, ", "));
}

ThreadBoard::ThreadBoard(std::shared_ptr<ThreadWorld> world, std::string name,
                         std::vector<int> world_ranks, std::chrono::milliseconds timeout,
                         bool launches_batches, int64_t packs_below)
    : world_(std::move(world)),
      name_(std::move(name)),
      world_ranks_(std::move(world_ranks)),
      timeout_(timeout),
      launches_batches_(launches_batches),
      packs_below_(packs_below) {}

std::shared_ptr<ThreadMeeting> ThreadBoard::arrive(int rank, uint64_t sequence, ThreadCall call,
                                                   const CollectiveInfo& info) {
  std::unique_lock lock(mutex_);
  if (!failure_.empty()) info.fail(failure_);
  auto& slot = meetings_[sequence];
  if (!slot) {
    slot = std::make_shared<ThreadMeeting>();
    slot->calls.resize(world_ranks_.size());
  }
  const std::shared_ptr<ThreadMeeting> meeting = slot;
  meeting->calls[rank] = std::move(call);
  ++meeting->arrived;
  check_same_locked(*meeting, rank, sequence, info);
  if (meeting->arrived < static_cast<int>(world_ranks_.size())) return meeting;

  // The last to arrive works for all, without the lock: other ranks may go on to later meetings.
  meetings_.erase(sequence);
  meeting->state = ThreadMeeting::State::kRunning;
  std::vector<ThreadCall> calls = std::move(meeting->calls);
  lock.unlock();
  std::string problem;
  try {
    run_thread_meeting(calls);
  } catch (const std::exception& error) {
    problem = error.what();
  }
  calls.clear();
  lock.lock();
  if (!problem.empty()) {
    meeting->state = ThreadMeeting::State::kFailed;
    fail_locked(problem);
    info.fail(failure_);
  }
  meeting->state = ThreadMeeting::State::kDone;
  changed_.notify_all();
  return meeting;
}

void ThreadBoard::check_same_locked(const ThreadMeeting& meeting, int rank, uint64_t sequence,
                                    const CollectiveInfo& info) {
  const ThreadCall& mine = meeting.calls[rank];
  const auto other =
      std::find_if(meeting.calls.begin(), meeting.calls.end(),
                   [&](const auto& call) { return call.operation != nullptr && &call != &mine; });
  if (other == meeting.calls.end() || other->signature() == mine.signature()) return;
  fail_locked(fmt::format(
      "the ranks disagree about collective {} of this group: rank {} called {} for '{}', rank {} "
      "called {} for '{}'; all ranks must make the same calls in the same order",
      sequence, other - meeting.calls.begin(), other->signature(), other->subject, rank,
      mine.signature(), mine.subject));
  info.fail(failure_);
}

bool ThreadBoard::wait_briefly(ThreadMeeting& meeting, const CollectiveInfo& info,
                               std::chrono::steady_clock::time_point deadline) {
  constexpr auto kMoment = std::chrono::milliseconds(200);
  const auto moment = std::chrono::steady_clock::now() + kMoment;
  std::unique_lock lock(mutex_);
  const bool in_time = changed_.wait_until(lock, std::min(moment, deadline), [&] {
    return is_settled_locked(meeting) || misses_an_ended_rank_locked(meeting);
  });
  if (meeting.state == ThreadMeeting::State::kDone) return true;
  if (!in_time && moment < deadline) return false;
  if (failure_.empty())
    fail_locked(fmt::format("{}{} of '{}' waited in vain for {}",
                            in_time ? "" : fmt::format("timed out after {} ms: ", timeout_.count()),
                            info.operation, info.subject,
                            missing_locked(meeting, in_time ? Who::kEnded : Who::kAll)));
  info.fail(failure_);
}

bool ThreadBoard::is_settled(const ThreadMeeting& meeting) {
  std::lock_guard lock(mutex_);
  return is_settled_locked(meeting);
}

bool ThreadBoard::is_settled_locked(const ThreadMeeting& meeting) const {
  switch (meeting.state) {
    case ThreadMeeting::State::kDone:
    case ThreadMeeting::State::kFailed:
      return true;
    // The last to arrive is writing: an abort must not let go of a rank whose tensors it writes to.
    case ThreadMeeting::State::kRunning:
      return false;
    case ThreadMeeting::State::kGathering:
      return !failure_.empty();
  }
  return true;
}

CommError ThreadBoard::split_error(int rank, const std::string& name) const {
  return CommError(fmt::format("split of group '{}' on rank {} failed: {}", name_, rank, failure_),
                   {.operation = "split", .subject = name, .group = name_, .rank = rank,
                    .size = static_cast<int>(world_ranks_.size())});
}

std::shared_ptr<ThreadBoard> ThreadBoard::child(uint64_t sequence, int rank,
                                                const std::string& name,
                                                const std::vector<int>& world_ranks) {
  std::unique_lock lock(mutex_);
  if (!failure_.empty())
    throw split_error(rank, name);
  Split& split = splits_[sequence];
  const bool is_new = !split.board;
  if (is_new) {
    split.first_rank = rank;
    split.board =
        std::make_shared<ThreadBoard>(world_, name, world_ranks, timeout_, launches_batches_,
                                      packs_below_);
  }
  if (split.board->world_ranks() != world_ranks || split.board->name() != name) {
    fail_locked(fmt::format(
        "the ranks disagree about split {}: rank {} asked for '{}' of world ranks [{}], rank {} "
        "for "
        "'{}' of [{}]; all ranks must make the same splits in the same order",
        sequence, split.first_rank, split.board->name(),
        fmt::join(split.board->world_ranks(), ", "), rank, name, fmt::join(world_ranks, ", ")));
    throw split_error(rank, name);
  }
  const std::shared_ptr<ThreadBoard> board = split.board;
  if (++split.arrived == world_ranks_.size()) splits_.erase(sequence);
  lock.unlock();
  // Without this board's lock, which the world takes while it holds its own.
  if (is_new) world_->add(board);
  return board;
}

void ThreadBoard::abort(const std::string& reason) {
  std::lock_guard lock(mutex_);
  fail_locked(reason);
}

void ThreadBoard::rank_ended(int world_rank) {
  std::lock_guard lock(mutex_);
  ended_.insert(world_rank);
  changed_.notify_all();
}

void ThreadBoard::fail_locked(const std::string& reason) {
  if (failure_.empty()) failure_ = reason;
  // Meetings that nobody completes any more would keep their tensors as long as the group lives.
  meetings_.clear();
  changed_.notify_all();
}

std::string ThreadBoard::missing_locked(const ThreadMeeting& meeting, Who who) const {
  std::vector<std::string> missing;
  for (size_t rank = 0; rank < meeting.calls.size(); ++rank) {
    if (meeting.calls[rank].operation != nullptr) continue;
    const bool has_ended = ended_.count(world_ranks_[rank]) > 0;
    if (has_ended || who == Who::kAll)
      missing.push_back(fmt::format("{}{}", rank, has_ended ? " (which has ended)" : ""));
  }
  return fmt::format("rank{} {}", missing.size() == 1 ? "" : "s", fmt::join(missing, ", "));
}

bool ThreadBoard::misses_an_ended_rank_locked(const ThreadMeeting& meeting) const {
  if (ended_.empty() || meeting.state != ThreadMeeting::State::kGathering) return false;
  for (size_t rank = 0; rank < meeting.calls.size(); ++rank)
    if (meeting.calls[rank].operation == nullptr && ended_.count(world_ranks_[rank])) return true;
  return false;
}

namespace {

void gather(const std::vector<ThreadCall>& calls, size_t index) {
  const int size = static_cast<int>(calls.size());
  for (const ThreadCall& receiver : calls)
    for (int rank = 0; rank < size; ++rank)
      copy_to_piece(receiver.outputs[index], rank, calls[rank].inputs[index]);
}

void scatter_reduced(const std::vector<ThreadCall>& calls, size_t index) {
  const int size = static_cast<int>(calls.size());
  for (int receiver = 0; receiver < size; ++receiver) {
    std::vector<at::Tensor> pieces;
    for (const ThreadCall& call : calls)
      pieces.push_back(piece_of(call.inputs[index], receiver, size));
    reduce_in_order(piece_of(calls[receiver].outputs[index], 0, 1), pieces, calls[receiver].op);
  }
}

void reduce_everywhere(const std::vector<ThreadCall>& calls) {
  std::vector<at::Tensor> tensors;
  for (const ThreadCall& call : calls) tensors.push_back(call.outputs[0]);
  reduce_in_order(tensors[0], tensors, calls[0].op);
  for (size_t rank = 1; rank < calls.size(); ++rank) copy_elements(tensors[rank], tensors[0]);
}

}  // namespace

void run_thread_meeting(const std::vector<ThreadCall>& calls) {
  const std::string_view operation = calls[0].operation;
  const size_t count = calls[0].outputs.size();
  for (size_t i = 0; i < count; ++i) {
    if (operation == "all_gather") gather(calls, i);
    if (operation == "reduce_scatter") scatter_reduced(calls, i);
  }
  if (operation == "all_reduce") reduce_everywhere(calls);
  if (operation == "broadcast")
    for (const ThreadCall& call : calls)
      copy_elements(call.outputs[0], calls[calls[0].root].outputs[0]);
}

}  // namespace fsdp
