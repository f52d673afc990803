#include "group/schedule_watch.hpp"

#include <signal.h>
#include <unistd.h>

#include "base/log.hpp"

namespace fsdp {

ScheduleWatch::ScheduleWatch(std::shared_ptr<ScheduleLog> log, ScheduleBoard board, WatchTimes times)
    : watcher_(std::make_shared<ScheduleWatcher>(std::move(log), std::move(board), times)),
      thread_([watcher = watcher_] {
        // Signals are for the program's own threads; but a fault of this one is to reach whoever reports faults.
        sigset_t others;
        sigfillset(&others);
        for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS}) sigdelset(&others, fault);
        pthread_sigmask(SIG_BLOCK, &others, nullptr);
        watcher->run();
      }),
      process_(::getpid()) {}

ScheduleWatch::~ScheduleWatch() {
  if (process_ != ::getpid()) {
    // Whatever the thread held when the process was copied, it holds for ever: touch nothing.
    new std::shared_ptr<ScheduleWatcher>(std::move(watcher_));
    new std::thread(std::move(thread_));
    return;
  }
  if (watcher_->end()) {
    thread_.join();
    return;
  }
  log().debug("the schedule check waits for its store; left alone");
  thread_.detach();
}

}  // namespace fsdp
