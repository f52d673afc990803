#pragma once

#include <stdexcept>

namespace fsdp {

/// Base class of libfsdp's exceptions. LibTorch's own exceptions pass through unchanged.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Invalid argument, mesh or module; nothing was modified.
class UsageError : public Error {
 public:
  using Error::Error;
};

/// A valid call at the wrong time, such as a setting of a root in the middle of backward.
class StateError : public Error {
 public:
  using Error::Error;
};

/// A collective failed. The message names the operation, its subject, the group and this rank. The communicator is unusable
/// afterwards.
class CommError : public Error {
 public:
  using Error::Error;
};

}  // namespace fsdp
