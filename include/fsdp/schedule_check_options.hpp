#pragma once

#include <chrono>
#include <optional>

#include "fsdp/error.hpp"

namespace fsdp {

/// The ranks of a root did not launch the same collectives in the same order (they took different
/// branches, used different parameters, or have other shapes), or one of them has gone. The message
/// is the same on all ranks and shows what each of them did by module name. The communicators are
/// unusable afterwards.
class ScheduleError : public CommError {
 public:
  using CommError::CommError;
};

/// How the ranks of a root check that they agree. They leave notes on a board (the store of the
/// process group; for ranks that are threads, shared memory) which a thread of its own reads: no
/// collective takes part, and nothing is sent while all goes well, but at the end of each step whose
/// collectives are not those of an earlier one, the first among them.
struct ScheduleCheckOptions {
  /// Also FSDP_SCHEDULE_CHECK=0. Without it ranks that disagree wait until the timeout.
  bool is_enabled = true;
  /// A host that has waited this long for a collective reports what each rank is doing.
  /// None: half of the timeout, at most 30 s.
  std::optional<std::chrono::milliseconds> late_after = {};
  /// A host that has waited this long looks whether the ranks disagree. None: a quarter of
  /// `late_after`, at most 1 s.
  std::optional<std::chrono::milliseconds> compare_after = {};
  /// Compare before every collective as well: much slower, and no rank gets further than the
  /// difference. None: if TORCH_DISTRIBUTED_DEBUG is DETAIL.
  std::optional<bool> before_every_collective = {};
};

}  // namespace fsdp
