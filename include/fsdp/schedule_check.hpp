#pragma once

#include "fsdp/schedule_check_options.hpp"

namespace fsdp {

class FSDPModule;

/// On a root, before its first collective, the same on all ranks. No communication.
/// Throws StateError if it is no root or has communicated already, UsageError for times that are not
/// positive.
void set_schedule_check(const FSDPModule& root, const ScheduleCheckOptions& options);

}  // namespace fsdp
