#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "fsdp/api.hpp"
#include "fsdp/error.hpp"

namespace fsdp {

/// Where the ranks of a root part.
struct FSDP_API ScheduleDifference {
  /// The number of the first collective that differs, counted from the root's first one. nullopt: no collective differs, but
  /// replicas have begun with different values.
  std::optional<int64_t> collective = {};
  /// What each rank of the root, by its rank in the world, launched as that collective, such as
  /// "all_gather of blocks.3 (12,345 bytes, Float) over 2 ranks", or why it launched none.
  std::map<int, std::string> launched = {};
};

/// The ranks of a root did not launch the same collectives in the same order, or one of them has ended. They may have taken
/// different branches, used different parameters or have other shapes, or one rank made a call alone in which all have to take
/// part. Also: two threads of a rank use one communicator at once. The message is the same on all ranks and shows, by
/// module names, what each of them did. The communicators are unusable afterwards.
class FSDP_API ScheduleError : public CommError {
 public:
  explicit ScheduleError(const std::string& message, ScheduleDifference difference = {})
      : CommError(message), difference_(std::make_shared<const ScheduleDifference>(std::move(difference))) {}

  const ScheduleDifference& difference() const noexcept { return *difference_; }

 private:
  std::shared_ptr<const ScheduleDifference> difference_;
};

/// How the ranks of a root check that they launch the same collectives, and come to those that calls outside of steps wait for
/// (norms, `full_tensor`, state dicts, checkpoints). A thread of each rank writes to and reads from the
/// process group's store (for ranks that are threads: shared memory), without collectives. Without trouble it writes once for
/// each step whose collectives differ from those of all earlier steps.
struct FSDP_API ScheduleCheckOptions {
  /// False: ranks that disagree wait until the timeout. FSDP_SCHEDULE_CHECK=0 does the same.
  bool is_enabled = true;
  /// After a wait of this time for a collective, the log says what each rank is doing. Default: half of the timeout, at most
  /// 30 s.
  std::optional<std::chrono::milliseconds> late_after = {};
  /// After a wait of this time for a collective, the ranks are compared. Default: a quarter of `late_after`, at most 1 s.
  std::optional<std::chrono::milliseconds> compare_after = {};
  /// True: the ranks are also compared before every collective. This is much slower, and stops all ranks at the first
  /// difference.
  /// Default: true if TORCH_DISTRIBUTED_DEBUG is DETAIL.
  std::optional<bool> before_every_collective = {};
};

}  // namespace fsdp
