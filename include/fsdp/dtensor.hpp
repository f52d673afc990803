#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "fsdp/api.hpp"
#include "fsdp/device_mesh.hpp"
#include "fsdp/local_ranges.hpp"
#include "fsdp/placement.hpp"

namespace fsdp {

/// A tensor that is distributed over a mesh. Its sizes, strides and numel are the whole tensor's; its dtype and device are
/// those of this rank's piece.
///
/// Every operator of LibTorch runs on it, with the result of the whole tensor. Optimizers, clipping, norms and other
/// elementwise operators run on the pieces. An operator that needs more gathers its operands, which is correct and slower;
/// `log level debug` names each such operator once. As for any collective, all ranks make the same calls.
///
/// It has no memory of its own: `data_ptr`, accessors and `storage().data()` throw, and `is_contiguous` is false. Code that
/// reads memory takes `to_local()` or `full_tensor()`. Views have its values. Operators that autograd records use the whole
/// tensor. `torch::save`, `item` and printing are collective calls. `torch::load` and `set_data` of a whole tensor keep this
/// rank's part.
///
/// A norm or a sum over all elements is a DTensor, too. The ranks' parts are added up when one is read, for all such numbers
/// at once.
///
/// This class is a typed handle; an `at::Tensor` handle of the same tensor behaves the same.
class FSDP_API DTensor : public at::Tensor {
 public:
  DTensor() = default;
  /// Throws UsageError if `tensor` is defined and no DTensor.
  explicit DTensor(at::Tensor tensor);

  /// Makes a DTensor of this rank's piece. `sizes` and `strides` are the whole tensor's. Default: the local sizes times the
  /// mesh size of each sharded dimension, in row-major order. No communication.
  ///
  /// Placements apply from left to right: a second Shard of a dimension cuts the piece that the first one left. A
  /// StridedShard is cut after mesh dimensions to its right. Shard(0) of a tensor without dimensions (`sizes` is an empty
  /// list) gives it to rank 0; the others hold size {0}.
  ///
  /// If autograd records and the piece requires grad, the result has a history, and the piece gets its part of the gradient.
  ///
  /// Throws UsageError for another number of placements than mesh dimensions, a dim out of range, a split factor below 1,
  /// Partials with different ops, local sizes that are not those of this rank's piece, strides with gaps or overlaps, and a
  /// tensor that is sparse or on another device type than the mesh (meta is allowed). Throws StateError if this rank is not
  /// in the mesh.
  static DTensor from_local(at::Tensor local, DeviceMesh mesh, std::vector<Placement> placements,
                            at::OptionalIntArrayRef sizes = {}, at::OptionalIntArrayRef strides = {});

  const DeviceMesh& mesh() const;
  /// One per mesh dimension; a Shard's dimension is never negative.
  const std::vector<Placement>& placements() const;
  /// This rank's piece, an ordinary tensor that shares memory. The piece of a DTensor that requires grad has a history;
  /// `grad_placements` are those of its gradient, by default this tensor's, with Replicate in place of Partial. Throws
  /// UsageError for a view that joins or splits a sharded dimension, which has no piece.
  at::Tensor to_local(std::vector<Placement> grad_placements = {}) const;
  /// The elements of the whole tensor in this rank's piece, in the order of `to_local()` read row-major. Empty ranges are
  /// left out and adjacent ones joined. No communication.
  std::vector<ElementRange> element_ranges() const;

  /// Returns the same tensor with other placements on the same mesh. A collective call, with the same arguments on all ranks.
  /// Sizes may be uneven, and any dtype will do. Where one mesh dimension changes, it communicates:
  ///
  ///   Shard -> Replicate            one all-gather of the pieces, padded to the largest
  ///   Shard -> another Shard        the same; then each rank keeps its part (Communicator has no all-to-all)
  ///   Shard -> Partial(sum)         nothing: the piece in a tensor of zeros
  ///   Shard -> Partial(max, min)    one all-gather
  ///   Replicate -> Shard            nothing
  ///   Replicate -> Partial(sum)     nothing: rank 0 of the mesh dimension keeps the value, the others hold zeros
  ///   Replicate -> Partial(max, min)  nothing: all keep the value
  ///   Partial -> Replicate          one all-reduce
  ///   Partial -> Shard              one reduce-scatter of the pieces, padded to the largest; an all-reduce
  ///                                 where padding would make that dearer
  ///   Partial -> Partial of another op  one all-reduce
  ///
  /// A StridedShard communicates as a Shard does. If several mesh dimensions change, reductions come first, and then those
  /// all-gathers that send the fewest bytes; elements that no rank needs any more are left out. Mesh dimensions of one rank,
  /// empty pieces and meta tensors communicate nothing. A Partial sum of bool is an "or".
  ///
  /// The result shares memory with this piece only if no rank had to move or drop elements.
  ///
  /// Gradients: if autograd records and the tensor requires grad, the result has a history. Its backward redistributes the
  /// gradient back, a collective call, and can be differentiated again. The result's gradient is taken to be placed as the
  /// result, with Replicate in place of Partial. `grad_placements` may say otherwise: where the result shards, the same
  /// Shard; elsewhere Replicate, or Partial(sum) if the ranks' gradients have to be added up.
  ///
  /// Throws UsageError, before any communication, for placements that from_local would refuse, for other `grad_placements`,
  /// for a maximum or minimum of complex numbers, and for a recorded change from or to Partial(max) or Partial(min), which
  /// has no local gradient.
  DTensor redistribute(std::vector<Placement> placements, std::vector<Placement> grad_placements = {}) const;

  /// The whole tensor on every rank, with its global strides: as `redistribute` to Replicate on all mesh dimensions, also for
  /// gradients and `grad_placements`. A collective call, unless all mesh dimensions replicate. If the local piece is the
  /// whole tensor, shares its memory.
  at::Tensor full_tensor(std::vector<Placement> grad_placements = {}) const;
};

FSDP_API bool is_dtensor(const at::Tensor& tensor);
/// This rank's piece of a DTensor, outside autograd. Any other tensor is returned as it is.
FSDP_API at::Tensor to_local(const at::Tensor& tensor);

/// Distributes `tensor`, which every rank has, over `mesh`. Each rank keeps a copy of its piece on the mesh's device, with the
/// requires_grad of `tensor`. With `kBroadcastFromRank0`, all get the values of the mesh's first rank: a collective call.
/// Otherwise nothing is communicated. Throws as DTensor::from_local does, and UsageError for a Partial placement.
enum class DistributeSource { kEachRankHasIt, kBroadcastFromRank0 };
FSDP_API DTensor distribute_tensor(const at::Tensor& tensor, DeviceMesh mesh,
                                   std::vector<Placement> placements,
                                   DistributeSource source = DistributeSource::kEachRankHasIt);

}  // namespace fsdp
