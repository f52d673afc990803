#pragma once

namespace fsdp {

/// A module whose registered parameters are seen by this library alone: what its users see it makes itself, as Python's modules
/// do. It gets this rank's rows as ordinary tensors, where others get DTensors.
class ShowsOwnParameters {
 protected:
  virtual ~ShowsOwnParameters() = default;
};

}  // namespace fsdp
