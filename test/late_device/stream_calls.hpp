#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <memory>
#include <thread>

#include "late_device.hpp"

// What a program does with streams, of late devices.
namespace fsdp::test {

inline const c10::impl::VirtualGuardImpl& guard_of_late() {
  static const c10::impl::VirtualGuardImpl guard(kLate);
  return guard;
}

inline c10::Stream new_stream(int device = 0) { return guard_of_late().getNewStream(late(device)); }
inline c10::Stream current_stream_of(int device = 0) { return guard_of_late().getStream(late(device)); }

inline void let_wait(c10::Stream waiting, c10::Stream before) {
  c10::Event event(kLate);
  event.record(before);
  event.block(waiting);
}

/// What the current stream is given from now on waits until it is over.
class Stall {
 public:
  explicit Stall(int device = 0) {
    HostStreams::enqueue(LateDevices::streams(device)->current(), [is_over = is_over_] {
      while (!*is_over) std::this_thread::yield();
    });
  }
  ~Stall() { end(); }
  Stall(const Stall&) = delete;
  Stall& operator=(const Stall&) = delete;
  void end() { *is_over_ = true; }

 private:
  std::shared_ptr<std::atomic<bool>> is_over_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace fsdp::test
