#pragma once

#include <spdlog/spdlog.h>

#include <string>

namespace fsdp {

/// The library's logger, on standard error, each line with the process's rank once it is known.
/// FSDP_LOG_LEVEL (trace, debug, info, warn, err, off) sets the level; default warn.
/// Messages go to `warn` (something the user should change) or `info` (said once, for the curious).
spdlog::logger& log();

/// The rank that the logger shows. Ranks that are threads share the logger and leave it unset.
void set_log_rank(int rank);

/// Logs `message` as a warning, once per process for each distinct text.
void warn_once(const std::string& message);

/// Logs `message` as information, once per process for each distinct text.
void info_once(const std::string& message);

}  // namespace fsdp
