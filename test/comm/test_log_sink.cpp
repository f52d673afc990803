#include <catch2/catch.hpp>

#include <fmt/format.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/log.hpp"
#include "fsdp/log.hpp"

// A program that replaces the log.

namespace fsdp::test {
namespace {

using Lines = std::vector<std::string>;

const char* name_of(LogLevel level) {
  constexpr const char* kNames[] = {"trace", "debug", "info", "warn", "error", "off"};
  return kNames[static_cast<int>(level)];
}

/// Takes the library's lines while it lives, and leaves the log as it was.
class TakenLog {
 public:
  explicit TakenLog(LogLevel level) : before_(log().level()) {
    set_log_level(level);
    set_log_sink([this](LogLevel at, std::string_view line) { lines.push_back(fmt::format("{} {}", name_of(at), line)); });
  }
  ~TakenLog() {
    set_log_sink({});
    log().set_level(before_);
  }
  TakenLog(const TakenLog&) = delete;
  TakenLog& operator=(const TakenLog&) = delete;

  Lines lines;

 private:
  spdlog::level::level_enum before_;
};

}  // namespace

TEST_CASE("a program's sink gets each line of its level and above, as text", "[comm][log_sink]") {
  const TakenLog taken(LogLevel::kWarn);
  log().info("left out");
  log().warn("{} of {}", 3, 4);
  log().error("{braces}");
  CHECK(taken.lines == Lines{"warn 3 of 4", "error {braces}"});
}

TEST_CASE("each level is the program's, and off is none", "[comm][log_sink]") {
  const TakenLog taken(LogLevel::kTrace);
  log().trace("a");
  log().debug("b");
  log().info("c");
  set_log_level(LogLevel::kOff);
  log().error("left out");
  CHECK(taken.lines == Lines{"trace a", "debug b", "info c"});
}

TEST_CASE("what a sink throws goes no further, and the next line comes", "[comm][log_sink]") {
  TakenLog taken(LogLevel::kWarn);
  int calls = 0;
  set_log_sink([&](LogLevel, std::string_view) {
    ++calls;
    throw std::runtime_error("the program's disk is full");
  });
  CHECK_NOTHROW(log().warn("first"));
  CHECK_NOTHROW(log().warn("second"));
  CHECK(calls == 2);
}

TEST_CASE("a sink may be replaced, also by itself, while others log", "[comm][log_sink]") {
  const TakenLog taken(LogLevel::kWarn);
  std::atomic<int> lines = 0;
  const auto count = [&](LogLevel, std::string_view) { ++lines; };
  std::atomic<bool> is_over = false;
  set_log_sink([&](LogLevel, std::string_view) {
    ++lines;
    set_log_sink(count);
  });
  std::thread replaces([&] {
    while (!is_over) set_log_sink(count);
  });
  for (int i = 0; i < 200; ++i) log().warn("line");
  is_over = true;
  replaces.join();
  CHECK(lines == 200);
}

}  // namespace fsdp::test
