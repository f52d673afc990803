#include "progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cmath>

namespace llama {

Progress::Progress(bool is_shown)
    : is_shown_(is_shown),
      is_terminal_(isatty(STDOUT_FILENO) == 1),
      next_(std::chrono::steady_clock::now()) {}

void Progress::show(const ProgressState& state) {
  const auto now = std::chrono::steady_clock::now();
  const bool is_last = state.step == state.steps;
  if (!is_shown_ || (now < next_ && !is_last)) return;
  next_ = now + (is_terminal_ ? std::chrono::milliseconds(200) : std::chrono::milliseconds(5000));
  fmt::print("{}step {}/{}  loss {:.4f}  {:.0f} tokens/s  sharded {}  unsharded peak {}  left {}{}",
             is_terminal_ ? "\r" : "", state.step, state.steps, state.loss, state.tokens_per_second,
             format_bytes(state.bytes.sharded), format_bytes(state.bytes.peak_unsharded),
             format_duration(state.left_s), is_terminal_ && !is_last ? "\033[K" : "\n");
  std::fflush(stdout);
}

std::string format_bytes(int64_t bytes) {
  auto value = static_cast<double>(bytes);
  if (bytes < 1024) return fmt::format("{} B", bytes);
  for (const auto* unit : {"KiB", "MiB"}) {
    value /= 1024;
    if (value < 1024) return fmt::format("{:.1f} {}", value, unit);
  }
  return fmt::format("{:.1f} GiB", value / 1024);
}

std::string format_duration(double seconds) {
  const auto whole = std::llround(seconds);
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

}  // namespace llama
