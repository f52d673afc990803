#include "trace/desync/alarm_poll.hpp"

#include <utility>

namespace fsdp {

void AlarmPoll::look(Clock::time_point now) {
  if (now < next_) return;
  next_ = now + interval_;
  auto alarm = board_.alarm();
  if (!alarm || *alarm == answered_ || inquiry_.take_over_verdict()) return;
  board_.post(activity_.report());
  answered_ = std::move(*alarm);
}

}  // namespace fsdp
