#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "fsdp/api.hpp"
#include "fsdp/timeline_events.hpp"

namespace fsdp {

class FSDPModule;

/// One trace of several ranks. Their clocks align them, which is exact on one machine. Each root of a rank has its own track.
FSDP_API std::string timeline_json(const std::vector<Timeline>& ranks);
/// Merges files that `Timeline::write` wrote on different ranks. Throws UsageError if a file cannot be read or written, or is
/// not a timeline.
FSDP_API void merge_timelines(const std::vector<std::string>& paths, const std::string& merged);

/// Starts recording what `module`'s root does, until `stop_timeline`. An earlier recording is dropped. At most `max_events`
/// are kept, which bounds the memory. No communication.
FSDP_API void start_timeline(const FSDPModule& module, size_t max_events = size_t{1} << 20);
/// Ends the recording and returns it. Throws StateError if none was started.
FSDP_API Timeline stop_timeline(const FSDPModule& module);

}  // namespace fsdp
