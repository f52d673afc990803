#pragma once

#include <spdlog/sinks/ostream_sink.h>

#include <sstream>
#include <string>

#include "base/log.hpp"

namespace fsdp::test {

/// What the library logs while this lives, on any thread. Made and asked by one.
class LoggedLines {
 public:
  LoggedLines() : sink_(std::make_shared<spdlog::sinks::ostream_sink_mt>(text_)) {
    log().sinks().push_back(sink_);
  }
  ~LoggedLines() { std::erase(log().sinks(), sink_); }
  LoggedLines(const LoggedLines&) = delete;
  LoggedLines& operator=(const LoggedLines&) = delete;

  std::string text() const { return text_.str(); }
  /// How often `part` was logged.
  int count(const std::string& part) const {
    const std::string all = text();
    int found = 0;
    for (size_t at = all.find(part); at != std::string::npos; at = all.find(part, at + 1)) ++found;
    return found;
  }

 private:
  std::ostringstream text_;
  spdlog::sink_ptr sink_;
};

}  // namespace fsdp::test
