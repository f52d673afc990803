#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "fsdp/api.hpp"

namespace fsdp {

/// Base class of libfsdp's exceptions. LibTorch's own exceptions pass through unchanged.
class FSDP_API Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message);
};

/// Invalid argument, mesh or module; nothing was modified.
class FSDP_API UsageError : public Error {
 public:
  using Error::Error;
};

/// A valid call at the wrong time, such as a setting of a root in the middle of backward.
class FSDP_API StateError : public Error {
 public:
  using Error::Error;
};

/// What failed in a CommError, as far as it is known.
struct FSDP_API FailedOperation {
  std::string operation = {};  ///< "all_gather", "reduce_scatter", "split", "init_process_group"; "": unknown
  std::string subject = {};    ///< what it was for, such as "blocks.3"; "": unknown, or none
  std::string group = {};      ///< the communicator's name, such as "world" or "shard[0,1]"; "": unknown
  int rank = -1;               ///< this process's rank in the group; -1: unknown
  int size = 0;                ///< the group's number of ranks; 0: unknown
};

/// A collective failed, or a communicator could not be made. The message names the operation, its subject, the group and this
/// rank, and `failed()` has them as fields. The communicator is unusable afterwards.
class FSDP_API CommError : public Error {
 public:
  explicit CommError(const std::string& message, FailedOperation failed = {})
      : Error(message), failed_(std::make_shared<const FailedOperation>(std::move(failed))) {}

  const FailedOperation& failed() const noexcept { return *failed_; }

 private:
  std::shared_ptr<const FailedOperation> failed_;  // shared, as copying an exception must not throw
};

}  // namespace fsdp
