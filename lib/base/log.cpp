#include "base/log.hpp"

#include <spdlog/sinks/stdout_color_sinks.h>

#include <mutex>
#include <set>

#include "base/environment.hpp"

namespace fsdp {
namespace {

void set_pattern(spdlog::logger& logger, const std::string& who) {
  logger.set_pattern("[%Y-%m-%d %H:%M:%S.%e] [" + who + "] [%l] %v");
}

spdlog::logger* make_logger() {
  auto* logger =
      new spdlog::logger("fsdp", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
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
  // Never destroyed: destructors of static objects may still log.
  static spdlog::logger* logger = make_logger();
  return *logger;
}

void set_log_rank(int rank) { set_pattern(log(), "fsdp rank " + std::to_string(rank)); }

void warn_once(const std::string& message) {
  if (is_new(message)) log().warn(message);
}

void info_once(const std::string& message) {
  // Asked before it is remembered: a message that the level hides is not used up.
  if (log().should_log(spdlog::level::info) && is_new(message)) log().info(message);
}

}  // namespace fsdp
