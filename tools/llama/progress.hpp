#pragma once

#include <chrono>
#include <string>

#include "execution.hpp"

namespace llama {

struct ProgressState {
  int64_t step = 0, steps = 0;
  double loss = 0;
  double tokens_per_second = 0;
  double left_s = 0;
  HeldBytes bytes;
};

/// The progress line on standard output: on a terminal one line that changes, elsewhere a new line
/// every few seconds. Ranks other than 0 show nothing.
class Progress {
 public:
  explicit Progress(bool is_shown);
  void show(const ProgressState& state);

 private:
  bool is_shown_, is_terminal_;
  std::chrono::steady_clock::time_point next_;
};

/// "1.4 MiB", "912 B".
std::string format_bytes(int64_t bytes);
/// "2:05".
std::string format_duration(double seconds);

}  // namespace llama
