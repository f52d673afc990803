#include "base/log.hpp"

#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "base/environment.hpp"
#include "base/routed_sink.hpp"

namespace fsdp {
namespace {

void set_pattern(spdlog::logger& logger, const std::string& who) {
  logger.set_pattern("[%Y-%m-%d %H:%M:%S.%e] [" + who + "] [%l] %v");
}

/// Never destroyed, nor is the logger: destructors of static objects may still log.
const std::shared_ptr<RoutedSink>& sink() {
  static const auto* sink = new std::shared_ptr<RoutedSink>(std::make_shared<RoutedSink>());
  return *sink;
}

spdlog::logger* make_logger() {
  auto* logger = new spdlog::logger("fsdp", sink());
  set_pattern(*logger, "fsdp");
  const std::string name = environment::log_level();
  const auto level = spdlog::level::from_str(name);
  logger->set_level(level);
  // from_str answers "off" for a word it does not know, which would hide what the user asked for.
  if (level == spdlog::level::off && name != "off") {
    logger->set_level(spdlog::level::warn);
    logger->warn(
        "FSDP_LOG_LEVEL: expected trace, debug, info, warn, err or off, found '{}'; using warn",
        name);
  }
  return logger;
}

/// True the first time that `message` is seen.
bool is_new(const std::string& message) {
  static auto* mutex = new std::mutex;
  static auto* seen = new std::set<std::string>;
  std::lock_guard lock(*mutex);
  return seen->insert(message).second;
}

}  // namespace

spdlog::logger& log() {
  static spdlog::logger* logger = make_logger();
  return *logger;
}

void set_log_rank(int rank) { set_pattern(log(), "fsdp rank " + std::to_string(rank)); }

void set_log_sink(LogSink program) { sink()->set(std::move(program)); }

void set_log_level(LogLevel level) {
  log().set_level(level == LogLevel::kOff ? spdlog::level::off : static_cast<spdlog::level::level_enum>(level));
}

void warn_once(const std::string& message) {
  if (is_new(message)) log().warn(message);
}

void info_once(const std::string& message) {
  // Asked before it is remembered: a message that the level hides is not used up.
  if (log().should_log(spdlog::level::info) && is_new(message)) log().info(message);
}

}  // namespace fsdp
