#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "comm/c10d/c10d_failure.hpp"
#include "comm/work.hpp"

namespace fsdp {

/// How a host waits for a work of c10d's.
enum class HostWait {
  kInSlices,  ///< of a moment each, so that an abort of the group ends it
  kAtOnce,    ///< the work knows no wait that ends before it does, or the wait is the device's
};

/// A collective of c10d's under way, as ours. It fails with the group's reason if `failure` has one by then; else
/// the group fails with its own.
std::shared_ptr<Work> c10d_work(c10::intrusive_ptr<c10d::Work> work, std::shared_ptr<C10dFailure> failure,
                                CollectiveInfo info, HostWait how);

}  // namespace fsdp
