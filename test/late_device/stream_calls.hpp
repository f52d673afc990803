#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

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

}  // namespace fsdp::test
