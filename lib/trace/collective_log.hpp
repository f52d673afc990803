#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/watch/group_place.hpp"

namespace fsdp {

enum class Operation : uint8_t { kAllGather, kReduceScatter, kAllReduce };
struct OperationNames {
  const char* plain;       ///< "all_gather"
  const char* range;       ///< of its launch, for a profiler: "FSDP::all_gather"
  const char* wait_range;  ///< of the wait for it: "FSDP::all_gather_wait"
};
const OperationNames& names_of(Operation operation);

/// One collective of a root, as all of its ranks should launch it.
struct CollectiveEntry {
  Operation operation = Operation::kAllGather;
  at::ScalarType dtype = at::kFloat;
  int ranks = 0;     ///< that take part: their number, as their names differ between replicas
  int group = -1;    ///< the ParamGroup's id in its root
  int64_t bytes = 0;
  /// Which of the group's parameters take part, as bits; those from the 63rd on share one. All ones:
  /// all of them.
  uint64_t params = kAllParams;
  static constexpr uint64_t kAllParams = ~uint64_t{0};
};

/// What one root has launched on this rank: a hash over all of it, the last entries themselves.
///
/// Writing costs a short lock and no allocation. Thread-safe: the training thread writes, the
/// watcher reads.
class CollectiveLog {
 public:
  static constexpr size_t kKept = 256;

  /// A place in the schedule: how many entries came before, and the hash over them.
  struct Position {
    uint64_t count = 0;
    uint64_t hash = 0;
    bool operator==(const Position&) const = default;
  };

  /// True if it is known what the group is called: `introduce` says it, before the group's first entry. Ids of a root are few
  /// and dense.
  bool knows(int group) const {
    return static_cast<size_t>(group) < subjects_.size() &&
           !subjects_[static_cast<size_t>(group)].name.empty();
  }
  void introduce(int group, std::string name, std::vector<std::string> params);

  std::string name_of_group(int group) const;

  /// Counts the collectives that this group awaits, which all ranks of this log make: how many came between two entries is a
  /// part of the log.
  void count_between(std::shared_ptr<GroupPlace> group);

  void note(const CollectiveEntry& entry);
  Position position() const;

  /// Ends a step, and with it all that came since the last one. True if none of the last few steps had the same collectives.
  bool end_step();
  /// Gives the step up: it is like no other.
  void abandon_step();

  struct Described {
    uint64_t hash;  ///< over all entries up to this one
    std::string text;  ///< "all_gather of blocks.3 (12,345 bytes, Float) over 2 ranks"
    uint64_t between = 0;  ///< what was awaited outside of groups since the entry before it
  };
  struct Window {
    uint64_t first = 0;  ///< how many entries came before those
    std::vector<Described> entries = {};
    AwaitedLog::State between = {};  ///< what has been awaited since the last of them
  };
  /// Returns the last entries, at most kKept.
  Window window() const;

 private:
  struct Subject {
    std::string name;
    uint64_t hash = 0;
    std::vector<std::string> params;
  };
  struct Kept {
    CollectiveEntry entry;
    uint64_t hash = 0;
    uint64_t between = 0;
  };
  std::string describe(const Kept& kept, uint64_t index) const;
  uint64_t take_between();

  mutable std::mutex mutex_;
  std::vector<Subject> subjects_;  // by group
  std::array<Kept, kKept> kept_;   // entry i at i % kKept
  Position position_;
  uint64_t step_hash_ = 0;
  std::array<uint64_t, 8> known_steps_ = {};  // 0: none
  size_t next_known_ = 0;
  std::shared_ptr<GroupPlace> counted_;  // before the first entry
  uint64_t counted_before_ = 0;          // of what it has awaited: up to the last entry
  std::deque<std::pair<uint64_t, std::string>> last_between_;  // entry, and what was awaited last before it
};

}  // namespace fsdp
