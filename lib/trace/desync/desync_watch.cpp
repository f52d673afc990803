#include "trace/desync/desync_watch.hpp"

#include <signal.h>
#include <unistd.h>

#include "base/log.hpp"

namespace fsdp {

DesyncWatch::DesyncWatch(std::shared_ptr<CollectiveLog> log, DesyncBoard board, WatchTimes times)
    : watcher_(std::make_shared<DesyncWatcher>(std::move(log), std::move(board), times)),
      thread_([watcher = watcher_] {
        // Signals are for the program's own threads; but a fault of this one is to reach whoever reports faults.
        sigset_t others;
        sigfillset(&others);
        for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS}) sigdelset(&others, fault);
        pthread_sigmask(SIG_BLOCK, &others, nullptr);
        watcher->run();
      }),
      process_(::getpid()) {}

DesyncWatch::~DesyncWatch() {
  if (process_ != ::getpid()) {
    // Whatever the thread held when the process was copied, it holds for ever: touch nothing.
    new std::shared_ptr<DesyncWatcher>(std::move(watcher_));
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
