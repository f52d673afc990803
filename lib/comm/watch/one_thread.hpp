#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

namespace fsdp {

/// Sees that the threads of a rank come to a communicator one at a time: no rank could tell whose collective is whose, or
/// bring two threads' into the order of the other ranks. Thread-safe.
class OneThread {
 public:
  /// One collective. `subject` stays valid until its `leave`.
  struct Use {
    const char* operation;  ///< "all_gather"
    std::string_view subject;
  };

  /// The calling thread launches this collective, or waits for it. It may be in others already.
  /// Where another thread is in one, returns what both are in, and the calling thread has not entered.
  std::optional<std::string> enter(const Use& use);
  void leave();

 private:
  std::mutex mutex_;
  std::thread::id holder_;
  int depth_ = 0;  // of the holder's collectives
  Use use_ = {};   // its outermost one
};

}  // namespace fsdp
