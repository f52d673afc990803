#pragma once

#include <stdexcept>

namespace fsdp {

/// Base of everything libfsdp throws itself; LibTorch's own errors pass through unchanged.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Invalid argument, mesh or module; nothing was modified.
class UsageError : public Error {
 public:
  using Error::Error;
};

/// A valid call at a wrong time, such as a setting of a root in the middle of its backward.
class StateError : public Error {
 public:
  using Error::Error;
};

/// A collective that failed: names the operation, what it was for, the group, and this rank.
/// The communicator is unusable afterwards.
class CommError : public Error {
 public:
  using Error::Error;
};

}  // namespace fsdp
