#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "trace/desync/desync_board.hpp"
#include "trace/first_values.hpp"

namespace fsdp {

/// Compares what this rank began with, once it has ended its first step, with what its neighbours say (Beginning).
/// Throws what the board throws.
class BeginningsCheck {
 public:
  /// patience: how long neighbours have to end their first step.
  explicit BeginningsCheck(std::chrono::milliseconds patience) : patience_(patience) {}

  void begin(std::vector<Beginning> own);

  struct BeginningsLook {
    std::chrono::milliseconds pause;               ///< until the next one
    std::optional<std::string> verdict = {};  ///< replicas have begun with different values
  };
  /// Reads what is there by now. Of values that differ beside each other one rank of all warns, once.
  BeginningsLook look(DesyncBoard& board);

 private:
  using Clock = std::chrono::steady_clock;
  std::optional<std::string> compare(DesyncBoard& board, int peer, const std::string& note);

  std::chrono::milliseconds patience_;
  std::vector<Beginning> own_;
  std::vector<int> awaited_;
  Clock::time_point until_ = {};
  std::chrono::milliseconds pause_{10};
  bool is_posted_ = true;
  bool is_told_ = false;  // by this rank or by another
};

}  // namespace fsdp
