#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/api.hpp"
#include "fsdp/communicator.hpp"

// For tests of programs that use libfsdp: fsdp/fsdp.hpp does not include it.
namespace fsdp {

/// One collective that `recording` has seen.
struct FSDP_API RecordedCall {
  std::string operation;  ///< "all_gather", "reduce_scatter", "all_reduce" or "broadcast"
  std::string subject;    ///< what it was for, such as "blocks.3"
  std::string group;      ///< the communicator's name
  int64_t bytes = 0;      ///< of the full (unsharded) buffer
  int tensors = 1;        ///< more than one in a batched launch
};

/// The collectives of a communicator and of those that are split off from it, in the order of their launches. Not thread-safe.
struct FSDP_API CallLog {
  std::vector<RecordedCall> calls;
  /// "operation subject" of each call.
  std::vector<std::string> names() const;
  void clear() { calls.clear(); }
};

/// A communicator that forwards to `inner` and appends each collective, when it is launched, to `log`. No communication.
FSDP_API std::shared_ptr<Communicator> recording(std::shared_ptr<Communicator> inner, std::shared_ptr<CallLog> log);

}  // namespace fsdp
