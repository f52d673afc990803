#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/watch/rank_lines.hpp"
#include "trace/collective_log.hpp"
#include "trace/desync/verdict/verdict.hpp"

namespace fsdp {

/// What one rank tells the others about itself.
struct RankReport {
  enum class State {
    kOutside,       ///< of any collective of this root
    kInCollective,  ///< waits for its last entry, or for an earlier one
    kFailed,        ///< a collective failed here
    kEnded,         ///< the root is gone: no more entries follow
  };

  int rank = 0;
  State state = State::kOutside;
  std::string waits_for = {};  ///< kInCollective: "all_gather of blocks.3"
  std::string where = {};      ///< kOutside: in the program, if that is known
  CollectiveLog::Window window = {};

  uint64_t count() const { return window.first + window.entries.size(); }
  bool holds(uint64_t index) const { return index >= window.first && index < count(); }
  const CollectiveLog::Described& at(uint64_t index) const {
    return window.entries[static_cast<size_t>(index - window.first)];
  }

  std::string encode() const;
  /// nullopt if the text is not one.
  static std::optional<RankReport> decode(const std::string& text);
};

/// The first entry that two ranks do not have in common, with what came between the entries; nullopt if one's schedule
/// continues the other's, or their windows do not meet. `is_older`: they parted before the window begins.
struct Difference {
  uint64_t index = 0;
  bool is_older = false;
};
std::optional<Difference> find_difference(const RankReport& one, const RankReport& other);

/// Ranks that disagree, and the message that says so: the first entry that differs, rank by rank, and
/// the last ones in common. nullopt if they agree. Depends on the reports alone.
std::optional<Verdict> find_disagreement(std::span<const RankReport> reports);
/// What each of them launched as collective `index`.
ScheduleDifference difference_at(std::span<const RankReport> reports, uint64_t index);

/// What each of `ranks` is doing, and the last ten entries of the longest schedule. Ranks without a
/// report gave no sign.
std::string describe_ranks(std::span<const RankReport> reports, std::span<const int> ranks);

}  // namespace fsdp
