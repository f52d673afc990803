#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "fsdp/timeline_events.hpp"

namespace fsdp {

class FSDPModule;

/// Several ranks in one trace, aligned by their clocks: exact on one machine. Roots of one rank have a track each.
std::string timeline_json(const std::vector<Timeline>& ranks);
/// Reads files that `Timeline::write` has written, of different ranks, and writes them as one.
/// Throws UsageError if one cannot be read or written, or is not such a file.
void merge_timelines(const std::vector<std::string>& paths, const std::string& merged);

/// Records what `module`'s root does from now on, until `stop_timeline`; without one it costs
/// nothing. Drops what it recorded before. No communication. `max_events`: memory is bounded by it.
void start_timeline(const FSDPModule& module, size_t max_events = size_t{1} << 20);
/// Throws StateError if none was started.
Timeline stop_timeline(const FSDPModule& module);

}  // namespace fsdp
