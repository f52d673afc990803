#pragma once

#include <spdlog/sinks/sink.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "fsdp/log.hpp"

namespace fsdp {

/// Hands lines to the program's sink, where it has one, else to standard error. Thread-safe: the logger's list of sinks stays
/// as it is, which other threads read without a lock.
class RoutedSink final : public spdlog::sinks::sink {
 public:
  RoutedSink();

  void set(LogSink sink);

  void log(const spdlog::details::log_msg& line) override;
  void flush() override { standard_error_->flush(); }
  void set_pattern(const std::string& pattern) override { standard_error_->set_pattern(pattern); }
  void set_formatter(std::unique_ptr<spdlog::formatter> formatter) override {
    standard_error_->set_formatter(std::move(formatter));
  }

 private:
  std::mutex mutex_;  // of program_, and not held while it runs: it may wait for a lock of the program's
  std::shared_ptr<const LogSink> program_;  // null: none
  const std::shared_ptr<spdlog::sinks::sink> standard_error_;
};

}  // namespace fsdp
