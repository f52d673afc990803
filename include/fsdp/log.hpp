#pragma once

#include <functional>
#include <string_view>

#include "fsdp/api.hpp"

namespace fsdp {

enum class LogLevel {
  kTrace,
  kDebug,
  kInfo,   ///< said once, for the curious
  kWarn,   ///< something that the program should change
  kError,
  kOff,    ///< for set_log_level: no lines
};

/// Takes one line of the library's log, without a newline. It is called on the thread that logs, which may be one of the
/// library's own, and on several at the same time. It must not wait for another rank.
using LogSink = std::function<void(LogLevel level, std::string_view line)>;

/// Sends the lines of the library's log to `sink` from now on, and not to standard error; an empty sink: to standard error
/// again. The level is as before. What `sink` throws is reported on standard error and goes no further. Thread-safe; no
/// communication.
FSDP_API void set_log_sink(LogSink sink);

/// Sets the level below which lines are not logged. Default: FSDP_LOG_LEVEL, else kWarn. Thread-safe; no communication.
FSDP_API void set_log_level(LogLevel level);

}  // namespace fsdp
