#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "fsdp/device_mesh.hpp"
#include "fsdp/local_ranges.hpp"
#include "fsdp/placement.hpp"

namespace fsdp {

class DTensorSpec;

/// What a tensor-parallel tensor, the *local* one here, is a part of.
struct TensorPart {
  DeviceMesh mesh;                     ///< of tensor parallelism alone
  DeviceMesh whole_mesh;               ///< the data-parallel dimensions, then these
  std::vector<Placement> placements;   ///< on `mesh`: Shard and Replicate, normalised
  std::vector<int64_t> sizes, strides;  ///< of the whole

  /// True if the local tensor is all of the whole.
  bool is_whole() const;
  /// Returns the placements on `whole_mesh` of a local tensor that data parallelism places so: strided where both cut one
  /// dimension.
  std::vector<Placement> with(std::vector<Placement> data_parallel) const;
  /// Returns elements of the local tensor, in row-major order, as elements of the whole.
  std::vector<ElementRange> in_whole(const std::vector<ElementRange>& local) const;
  /// Returns how the whole is spread over `mesh`; the pieces are the local tensors.
  DTensorSpec spec(std::string name) const;
  /// Returns the local tensor's elements of `whole`; may share its memory.
  at::Tensor part_of(const at::Tensor& whole) const;
};

/// What a parameter is beyond its data-parallel ranks.
struct ParamReach {
  std::shared_ptr<const TensorPart> part = {};  ///< null: nothing is known of other ranks
  /// Along these, ranks hold other elements, which the norm of a gradient adds up. Each has several ranks.
  std::vector<std::shared_ptr<Communicator>> summed_over = {};
};

/// Checks and completes what a user says of `local`, whose data-parallel mesh is whole_mesh's first dimensions.
/// sizes: of the whole; empty: from the local ones. Throws UsageError, beginning with `name`.
TensorPart make_tensor_part(const at::Tensor& local, DeviceMesh mesh, DeviceMesh whole_mesh,
                            std::vector<Placement> placements, std::vector<int64_t> sizes,
                            std::string_view name);

/// Returns the groups of several ranks along which the part is cut.
std::vector<std::shared_ptr<Communicator>> cut_over(const TensorPart& part);
/// Returns the groups of several ranks that a mesh has.
std::vector<std::shared_ptr<Communicator>> groups_of(const DeviceMesh& mesh);

}  // namespace fsdp
