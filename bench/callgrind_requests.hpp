#pragma once

#include <valgrind/callgrind.h>

namespace fsdp::bench {

/// Instructions are counted between these two; outside valgrind they do nothing.
inline void start_counting_instructions() {
  CALLGRIND_START_INSTRUMENTATION;
  CALLGRIND_ZERO_STATS;
}

/// Writes what was counted to callgrind's next output file, marked with `label`.
inline void stop_counting_instructions(const char* label) {
  CALLGRIND_DUMP_STATS_AT(label);
  CALLGRIND_STOP_INSTRUMENTATION;
}

}  // namespace fsdp::bench
