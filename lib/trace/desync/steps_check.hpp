#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

#include "trace/collective_log.hpp"
#include "trace/desync/desync_board.hpp"

namespace fsdp {

/// Compares the steps of this rank that were like none before with its neighbours': hashes, and where one has none of its
/// own, its report. Throws what the board throws.
class StepsCheck {
 public:
  /// ask_after: how long neighbours have to come to the end of the same step by themselves. patience: at all.
  StepsCheck(std::chrono::milliseconds ask_after, std::chrono::milliseconds patience)
      : ask_after_(ask_after), patience_(patience) {}

  /// Steps have ended there. own: this rank's report of now, as later ones may have forgotten where the ranks parted.
  void begin(std::span<const CollectiveLog::Position> steps, RankReport own);

  struct StepsLook {
    std::chrono::milliseconds pause;  ///< until the next one
    bool differs = false;             ///< a neighbour's report differs from `own`
  };
  StepsLook look(DesyncBoard& board);

  const RankReport& own() const { return own_; }
  /// A neighbour has had another hash.
  bool is_suspicious() const { return is_suspicious_; }

 private:
  using Clock = std::chrono::steady_clock;
  bool ask(DesyncBoard& board);

  std::chrono::milliseconds ask_after_, patience_;
  uint64_t number_ = 0;  // of steps
  uint64_t count_ = 0;   // entries up to the last of them
  std::vector<uint64_t> hashes_;  // of the last of them, the newest first
  RankReport own_;
  enum class Stage { kNew, kPosted, kAsked } stage_ = Stage::kPosted;
  std::vector<int> awaited_;
  Clock::time_point ask_at_ = {}, until_ = {};
  std::chrono::milliseconds pause_{10};
  bool is_suspicious_ = false;
};

}  // namespace fsdp
