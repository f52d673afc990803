#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/api.hpp"

namespace fsdp {

/// Something that took time on one rank.
struct FSDP_API TimelineEvent {
  enum class Kind {
    kPhase,       ///< of a step: "forward", "backward"; "between steps"
    kUse,         ///< operators that use a group ran, named after it
    kRuntime,     ///< the library's own work or wait: "FSDP::all_gather_wait (blocks.3)"
    kCollective,  ///< from its launch until the host has waited for it, or gave it up
  };
  Kind kind = Kind::kPhase;
  std::string name;
  int64_t begin_ns = 0, end_ns = 0;  ///< since the epoch, from one steady clock
  // Of collectives alone:
  std::string subject = {};  ///< the module's name
  std::string group = {};    ///< the ranks that took part, such as "shard[0,1]"
  int ranks = 0;
  int64_t bytes = 0;     ///< of the full buffer, as `statistics` counts them
  bool is_given_up = false;  ///< nobody waited for the result
};

/// "phase", "use", "runtime" or "collective".
FSDP_API const char* to_string(TimelineEvent::Kind kind);

/// What a root holds beside its shards, from one time until the next that was written down.
struct FSDP_API TimelineBytes {
  int64_t time_ns = 0;    ///< as an event's
  int64_t unsharded = 0;  ///< parameters that are gathered, or on their way
  int64_t packed = 0;     ///< gradients in reductions that have not let go of them
};

/// What one rank did, and when, as its host saw it.
struct FSDP_API Timeline {
  int rank = 0;
  std::vector<TimelineEvent> events;  ///< by begin
  std::vector<TimelineBytes> bytes = {};  ///< by time; the first when the recording began
  int64_t sharded_bytes = 0;              ///< of this rank's shards, which are there all the time
  int64_t dropped = 0;                ///< events and byte counts that found no room

  /// Returns it in the Chrome trace format, which ui.perfetto.dev and chrome://tracing open: one process per rank, with
  /// counters of unsharded, packed and live bytes. Live bytes are the other two and the shards together.
  std::string json() const;
  /// Throws UsageError if the file cannot be written.
  void write(const std::string& path) const;
};

}  // namespace fsdp
