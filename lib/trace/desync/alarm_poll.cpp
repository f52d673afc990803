#include "trace/desync/alarm_poll.hpp"

#include <utility>

namespace fsdp {

void AlarmPoll::look(Clock::time_point now) {
  if (now < next_) return;
  next_ = now + interval_;
  auto alarm = board_.alarm();
  if (!alarm || *alarm == answered_ || inquiry_.take_over_verdict()) return;
  auto report = activity_.report();
  board_.post(report);
  answered_ = std::move(*alarm);
  if (report.state != RankReport::State::kOutside) return;
  // Behind it, as the answer may take its time.
  report.where = activity_.whereabouts();
  if (!report.where.empty()) board_.post(report);
}

}  // namespace fsdp
