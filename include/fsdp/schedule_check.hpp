#pragma once

#include "fsdp/api.hpp"
#include "fsdp/schedule_check_options.hpp"

namespace fsdp {

class FSDPModule;

/// Sets how a root's ranks are compared. Call it before the root's first collective, with the same options on all ranks. No
/// communication. Throws StateError if `root` is not a root or has communicated, UsageError for times that are not positive.
FSDP_API void set_schedule_check(const FSDPModule& root, const ScheduleCheckOptions& options);

}  // namespace fsdp
