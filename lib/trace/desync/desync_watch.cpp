#include "trace/desync/desync_watch.hpp"

#include <signal.h>
#include <unistd.h>

#include "base/log.hpp"
#include "dispatch/host_lock.hpp"

namespace fsdp {

namespace {

/// Longer than the last note takes.
constexpr auto kAtOnce = std::chrono::seconds(1);
/// Longer than any answer of a store that is alive.
constexpr auto kFarewell = std::chrono::seconds(5);

}  // namespace

DesyncWatch::DesyncWatch(std::shared_ptr<CollectiveLog> log, const DesyncBoard& board, WatchTimes times)
    : watcher_(std::make_shared<DesyncWatcher>(std::move(log), board, times)),
      thread_([watcher = watcher_] {
        // Signals are for the program's own threads; but a fault of this one is to reach whoever reports faults.
        sigset_t others;
        sigfillset(&others);
        for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS}) sigdelset(&others, fault);
        pthread_sigmask(SIG_BLOCK, &others, nullptr);
        watcher->run();
      }),
      process_(::getpid()) {
  board.rank_watch()->add(watcher_, {.late_after = times.late_after, .alarm_after = times.compare_after});
}

DesyncWatch::~DesyncWatch() {
  if (process_ != ::getpid()) {
    // Whatever the thread held when the process was copied, it holds for ever: touch nothing.
    new std::shared_ptr<DesyncWatcher>(std::move(watcher_));
    new std::thread(std::move(thread_));
    return;
  }
  if (!has_ended()) {
    log().debug("the schedule check waits for its store; left alone");
    thread_.detach();
    return;
  }
  thread_.join();
}

bool DesyncWatch::has_ended() {
  if (watcher_->end(kAtOnce)) return true;
  // What the thread says may need the lock that this one holds.
  const WithoutHostLock may_wait;
  return watcher_->end(kFarewell);
}

}  // namespace fsdp
