#pragma once

#include "fsdp/all_gather_extension.hpp"

namespace fsdp {

/// An extension that makes what this rank sends of its own accord, from more than the piece, and knows only then how much it
/// is: as many bytes on every rank. It keeps what it has made of what was gathered, until the group is released.
///
/// A write to the sharded parameter does not reach what is unsharded. Where there is a gather the unsharded parameter has no
/// memory, and `post_all_gather` is given an undefined tensor; else its values mean nothing.
class PreparedExtension : public AllGatherExtension {
 public:
  /// Is called before each gather, on the stream that computes: `encoded_bytes` tells of this one from now on.
  virtual void prepare() = 0;
  /// The group is released.
  virtual void release() noexcept = 0;
};

}  // namespace fsdp
