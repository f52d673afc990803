#pragma once

#include <cstddef>
#include <vector>

#include "group/group_options.hpp"
#include "group/group_parts.hpp"
#include "group/reduce/gradient_dtypes.hpp"
#include "group/reduce/gradient_store.hpp"
#include "group/reduce/gradient_streams.hpp"
#include "group/reduce/reduce_bucket.hpp"

namespace fsdp {

/// What becomes of one group's gradients, and those that wait for it.
struct GroupGradients {
  const ReduceOptions& options;
  GradientDtypes dtypes;
  GradientStore store;
  GradientStreams streams = {};
  size_t trainable_count = 0;  ///< parameters that need a gradient, as of the last `sync_requires_grad`
  /// Keeps those of the last reduction that was finished, without gradients, for the next one to fill (collect_gradients).
  std::vector<ReduceBucket> kept_buckets = {};

  /// parts, options: outlive this. count: of the parameters that they are about to have.
  GroupGradients(GroupParts& parts, const ReduceOptions& options, size_t count)
      : options(options), dtypes(parts, options), store(parts.params, count) {}
  GroupGradients(const GroupGradients&) = delete;
  GroupGradients& operator=(const GroupGradients&) = delete;
};

/// A backward is over: what it has left is added up for a later one.
inline void end_backward(GroupGradients& gradients) {
  gradients.streams.end_backward(gradients.store);
  if (!gradients.options.requires_gradient_sync) gradients.store.accumulate(gradients.dtypes);
  gradients.store.end_backward();
}

/// What no reduction has taken goes.
inline void drop_unreduced(GroupGradients& gradients) {
  gradients.store.drop();
  gradients.streams.drop();
}

}  // namespace fsdp
