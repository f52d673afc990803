#include "base/routed_sink.hpp"

#include <spdlog/sinks/stdout_color_sinks.h>

#include <algorithm>
#include <string_view>
#include <utility>

namespace fsdp {

namespace {

static_assert(static_cast<int>(LogLevel::kTrace) == SPDLOG_LEVEL_TRACE &&
                  static_cast<int>(LogLevel::kError) == SPDLOG_LEVEL_ERROR,
              "the levels are spdlog's");

}  // namespace

RoutedSink::RoutedSink() : standard_error_(std::make_shared<spdlog::sinks::stderr_color_sink_mt>()) {}

void RoutedSink::set(LogSink sink) {
  auto program = sink ? std::make_shared<const LogSink>(std::move(sink)) : nullptr;
  {
    std::lock_guard lock(mutex_);
    program_.swap(program);
  }
  // The one before ends here, without the lock, as what it holds may log.
}

void RoutedSink::log(const spdlog::details::log_msg& line) {
  std::shared_ptr<const LogSink> program;
  {
    std::lock_guard lock(mutex_);
    program = program_;
  }
  if (!program) return standard_error_->log(line);
  // spdlog knows one level more, which the library does not use.
  const int level = std::min(static_cast<int>(line.level), static_cast<int>(LogLevel::kError));
  (*program)(static_cast<LogLevel>(level), std::string_view(line.payload.data(), line.payload.size()));
}

}  // namespace fsdp
