#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "comm/notice_board.hpp"
#include "comm/work.hpp"

namespace fsdp {

class ThreadBoard;

/// All groups of one `run_ranks`, so that a rank that ends or throws is noticed in every one.
class ThreadWorld {
 public:
  explicit ThreadWorld(std::chrono::milliseconds timeout) : notices_(thread_notice_board(timeout)) {}

  const std::shared_ptr<NoticeBoard>& notices() const { return notices_; }
  void add(const std::shared_ptr<ThreadBoard>& board);
  /// Fails every group, of now and later.
  void abort(const std::string& reason);
  /// `world_rank` makes no more calls: collectives that still wait for it fail.
  void rank_ended(int world_rank);

 private:
  const std::shared_ptr<NoticeBoard> notices_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<ThreadBoard>> boards_;
  std::string failure_;
  std::set<int> ended_;
};

/// What one rank brings to a collective. Tensors by value: they live until it is done, even if the
/// Work is dropped.
struct ThreadCall {
  const char* operation = nullptr;
  std::string subject = {};
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  std::vector<at::Tensor> outputs = {};
  std::vector<at::Tensor> inputs = {};

  /// What must be the same on all ranks, in words: "all_gather of 2 tensors (4 x Float, 3 x Long)".
  std::string signature() const;
};

/// One collective of a group. Guarded by its board's mutex.
struct ThreadMeeting {
  enum class State { kGathering, kRunning, kDone, kFailed };
  State state = State::kGathering;
  std::vector<ThreadCall> calls;  ///< by rank; operation is null for those not there yet
  int arrived = 0;
};

/// Where the ranks of one group meet. The k-th call of each rank belongs to the k-th meeting; a
/// rank may be any number of meetings ahead. The last to arrive does the copying and the arithmetic
/// for all.
///
/// Thread-safe: one object is shared by the group's ranks.
class ThreadBoard {
 public:
  ThreadBoard(std::shared_ptr<ThreadWorld> world, std::string name, std::vector<int> world_ranks,
              std::chrono::milliseconds timeout, bool launches_batches, int64_t packs_below);

  /// Throws CommError if the group has failed, or fails because of this very call.
  std::shared_ptr<ThreadMeeting> arrive(int rank, uint64_t sequence, ThreadCall call,
                                        const CollectiveInfo& info);
  /// True once `meeting` is done, false after a moment; throws CommError if it failed or the deadline has passed.
  bool wait_briefly(ThreadMeeting& meeting, const CollectiveInfo& info, std::chrono::steady_clock::time_point deadline);
  /// True if done or failed.
  bool is_settled(const ThreadMeeting& meeting);

  /// The board of the `sequence`-th split, the same object for all ranks that ask.
  std::shared_ptr<ThreadBoard> child(uint64_t sequence, int rank, const std::string& name,
                                     const std::vector<int>& world_ranks);

  void abort(const std::string& reason);
  void rank_ended(int world_rank);

  const std::shared_ptr<NoticeBoard>& notices() const { return world_->notices(); }
  std::chrono::milliseconds timeout() const { return timeout_; }
  const std::string& name() const { return name_; }
  const std::vector<int>& world_ranks() const { return world_ranks_; }
  bool launches_batches() const { return launches_batches_; }
  int64_t packs_below() const { return packs_below_; }

 private:
  struct Split {
    std::shared_ptr<ThreadBoard> board;
    int first_rank = 0;
    size_t arrived = 0;
  };

  CommError split_error(int rank, const std::string& name) const;
  void fail_locked(const std::string& reason);
  void check_same_locked(const ThreadMeeting& meeting, int rank, uint64_t sequence,
                         const CollectiveInfo& info);
  bool is_settled_locked(const ThreadMeeting& meeting) const;
  /// "ranks 1, 2": those not there, or of them only those that have ended.
  enum class Who { kAll, kEnded };
  std::string missing_locked(const ThreadMeeting& meeting, Who who) const;
  bool misses_an_ended_rank_locked(const ThreadMeeting& meeting) const;

  const std::shared_ptr<ThreadWorld> world_;
  const std::string name_;
  const std::vector<int> world_ranks_;
  const std::chrono::milliseconds timeout_;
  const bool launches_batches_;
  const int64_t packs_below_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, std::shared_ptr<ThreadMeeting>> meetings_;  ///< those still gathering
  std::map<uint64_t, Split> splits_;                             ///< those not all ranks have made
  std::set<int> ended_;                                          ///< world ranks
  std::string failure_;                                          ///< empty: none
};

/// Does what the calls of all ranks ask for.
void run_thread_meeting(const std::vector<ThreadCall>& calls);

}  // namespace fsdp
