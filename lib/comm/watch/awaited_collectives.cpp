#include "comm/watch/awaited_collectives.hpp"

#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <string>

#include "base/environment.hpp"
#include "base/log.hpp"
#include "comm/notice_board.hpp"
#include "comm/watch/group_place.hpp"
#include "comm/watch/rank_lines.hpp"
#include "comm/watch/rank_watch.hpp"
#include "comm/watch/thread_in_group.hpp"
#include "fsdp/error.hpp"

namespace fsdp {

namespace {

using Clock = std::chrono::steady_clock;

/// Tells the other ranks of an awaited collective that takes long, and asks them what they do.
class AwaitedWait {
 public:
  AwaitedWait(Communicator& group, GroupPlace& place, const OneThread::Use& use)
      : group_(group),
        place_(place),
        board_(*notice_board_of(group)),
        own_(group.ranks()[static_cast<size_t>(group.rank())]),
        watch_(board_.rank_watch(own_)),
        number_(place.awaited().note(use.operation, use.subject)),
        call_{fmt::format("{} of '{}'", use.operation, use.subject)} {
    watch_->begin(call_);
  }
  ~AwaitedWait() { watch_->end(call_); }
  AwaitedWait(const AwaitedWait&) = delete;
  AwaitedWait& operator=(const AwaitedWait&) = delete;

  /// The collective is not done yet.
  void look() {
    const auto now = Clock::now();
    const auto times = watch_->times(board_.timeout());
    if (now - begin_ < times.alarm_after) return;
    try {
      if (!is_asked_) ask();
      // This rank may have no other thread that does.
      watch_->answer(now);
      if (now - begin_ >= times.late_after && !is_late_) report();
    } catch (const std::exception& error) {
      log().debug("{} is late, and the other ranks cannot be asked: {}", call_.text, error.what());
    }
  }

  /// Throws what the ranks have to do with the error, else the error. To be called in its handler.
  [[noreturn]] void explain(const CommError& error) {
    watch_->explain(place_, error.what());
    std::string late;
    if (is_late_) try {
        late = board_.read(key("report")).value_or("");
      } catch (const std::exception& unreachable) {
        log().debug("the report about {} cannot be read: {}", call_.text, unreachable.what());
      }
    if (late.empty()) throw;
    throw CommError(fmt::format("{}\n{}", error.what(), late), error.failed());
  }

 private:
  /// Returns the key of a note about this collective, the same on all ranks that have come to it. The name tells the ranks,
  /// which the path does not.
  std::string key(const char* what) const {
    return fmt::format("awaited/{}{}/{}/{}", what, place_.path(), group_.name(), number_);
  }

  void ask() {
    board_.post(awaited_notes::kAlarm, key("alarm"));
    is_asked_ = true;
  }

  /// Says once for all ranks who is where.
  void report() {
    is_late_ = true;
    const auto own = std::to_string(own_);
    if (board_.post_first(key("late"), own) != own) return;
    const auto newest = board_.read(awaited_notes::kAlarm).value_or("");
    RankLines lines;
    for (const int rank : group_.ranks())
      lines.add(rank == own_ ? "waits for " + call_.text : what_does(rank, newest), rank);
    const std::chrono::duration<double> waited = Clock::now() - begin_;
    const auto text = fmt::format(
        "{} is late: rank {} has waited {:.1f} s for it. All ranks of group '{}' have to make the call that it belongs to. "
        "What "
        "the ranks do:{}",
        call_.text, own_, waited.count(), group_.name(), lines.text());
    board_.post(key("report"), text);
    log().warn(text);
  }

  /// Says what a rank does by its last note, if that answers this alarm or a later one.
  std::string what_does(int rank, const std::string& newest_alarm) {
    const auto note = board_.read(awaited_notes::of_rank(rank)).value_or("\n");
    const auto end = note.find('\n');
    const auto alarm = note.substr(0, end);
    if (alarm.empty() || (alarm != key("alarm") && alarm != newest_alarm)) return "gave no sign";
    return note.substr(end + 1);
  }

  Communicator& group_;
  GroupPlace& place_;
  NoticeBoard& board_;  // the group's
  const int own_;
  const std::shared_ptr<RankWatch> watch_;
  const uint64_t number_;
  const RankWatch::Awaited call_;
  const Clock::time_point begin_ = Clock::now();
  bool is_asked_ = false, is_late_ = false;
};

template <class Start>
void run(Communicator& group, const OneThread::Use& use, const Start& start) {
  const auto place = group.size() == 1 ? nullptr : place_of(group);
  if (!place) return start()->wait();
  const ThreadInGroup inside(group, place, use);
  if (!notice_board_of(group) || !environment::checks_schedule()) return start()->wait();
  AwaitedWait awaited(group, *place, use);
  try {
    for (const auto work = start(); !work->wait_briefly();) awaited.look();
  } catch (const CommError& error) {
    awaited.explain(error);
  }
}

}  // namespace

namespace awaited {

void all_gather(Communicator& group, const at::Tensor& output, const at::Tensor& input, std::string_view subject) {
  run(group, {"all_gather", subject}, [&] { return group.start_all_gather(output, input, subject); });
}

void reduce_scatter(Communicator& group, const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                    std::string_view subject) {
  run(group, {"reduce_scatter", subject}, [&] { return group.start_reduce_scatter(output, input, op, subject); });
}

void all_reduce(Communicator& group, const at::Tensor& tensor, ReduceOp op, std::string_view subject) {
  run(group, {"all_reduce", subject}, [&] { return group.start_all_reduce(tensor, op, subject); });
}

void broadcast(Communicator& group, const at::Tensor& tensor, int root, std::string_view subject) {
  run(group, {"broadcast", subject}, [&] { return group.start_broadcast(tensor, root, subject); });
}

}  // namespace awaited
}  // namespace fsdp
