#pragma once

#include <memory>
#include <numeric>
#include <vector>

#include "comm/notice_board.hpp"
#include "trace/desync/desync_board.hpp"
#include "trace/desync/desync_inquiry.hpp"
#include "trace/desync/verdict/desync_verdict.hpp"
#include "trace/desync/host_activity.hpp"

namespace fsdp::test {

inline std::shared_ptr<NoticeBoard> shared_board() { return thread_notice_board(std::chrono::milliseconds(1000)); }

inline std::vector<int> first_ranks(int count) {
  std::vector<int> ranks(static_cast<size_t>(count));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

/// What a rank's watcher is made of, without its threads: the test does one thing after another, for all ranks.
struct WatchedRank {
  WatchedRank(const std::shared_ptr<NoticeBoard>& notices, int rank, int ranks,
              std::chrono::milliseconds settling = std::chrono::milliseconds(0))
      : board(notices, "schedule", rank, first_ranks(ranks)),
        activity(log, rank),
        inquiry(board, verdict, settling) {
    for (const int group : {0, 1}) log->introduce(group, group == 0 ? "layer0" : "layer1", {"weight"});
  }

  /// The host gathers the group, and stays in the collective.
  void gather(int group) {
    log->note({.operation = Operation::kAllGather, .ranks = 2, .group = group, .bytes = 64});
    activity.enter(Operation::kAllGather, group);
  }
  void post() { board.post(activity.report()); }
  void post_as(RankReport::State state) {
    auto report = activity.report();
    report.state = state;
    board.post(report);
  }
  /// The verdict; empty: there is none.
  std::string told() const { return verdict.is_given() ? verdict.get().text : std::string(); }

  std::shared_ptr<CollectiveLog> log = std::make_shared<CollectiveLog>();
  DesyncBoard board;
  HostActivity activity;
  DesyncVerdict verdict;
  DesyncInquiry inquiry;
};

}  // namespace fsdp::test
