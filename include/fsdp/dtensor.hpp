#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "fsdp/device_mesh.hpp"
#include "fsdp/local_ranges.hpp"
#include "fsdp/placement.hpp"

namespace fsdp {

/// A tensor that is spread over a mesh, and is one tensor to all who use it: sizes, strides and numel are the whole's, dtype and
/// device this rank's piece's. Every operator of LibTorch runs on it and computes what it computes on the whole. Optimizers,
/// clipping, norms and what else works element by element run on the pieces; where an operator needs more than them, it
/// gathers: right, and slower (`log level debug` names such an operator once). All ranks make the same calls, as for any
/// collective.
///
/// It has no memory of its own: `data_ptr`, accessors and `storage().data()` throw, and `is_contiguous` is false. What reads
/// memory takes `to_local()` or `full_tensor()`. Views show its values. What autograd records of it is computed with the whole.
/// `torch::save`, `item` and printing gather, so all ranks call them; `torch::load` and `set_data` of a whole tensor keep this
/// rank's part.
///
/// A reduction to one number (a norm, a sum) is a DTensor, too: the ranks' parts are added up when somebody reads one, for all
/// such numbers at once.
///
/// This class is a handle that says so in the type; `at::Tensor` handles of the same tensor behave alike.
class DTensor : public at::Tensor {
 public:
  DTensor() = default;
  /// Throws UsageError if `tensor` is defined and no DTensor.
  explicit DTensor(at::Tensor tensor);

  /// Wraps this rank's piece. `sizes` and `strides` are the whole tensor's; without them the local
  /// sizes times the mesh size of each sharded dimension, in row-major order. No communication.
  ///
  /// Placements act left to right: a second Shard of one dimension cuts what the first one left. Only a
  /// StridedShard is cut after mesh dimensions to its right, see there. Shard(0) of a 0-dim tensor
  /// (`sizes` must say so: an empty list) gives it to rank 0; the others hold size {0}.
  ///
  /// With autograd on and a piece that requires grad, the result has a history, and the piece gets its part of the gradient.
  ///
  /// Throws UsageError if placements are not one per mesh dimension, the dim of a Shard or StridedShard is
  /// out of range, a split factor is below 1, two Partials differ, the local sizes are not those of this
  /// rank's piece, the strides leave gaps or overlap, or the tensor is sparse or on another device
  /// type than the mesh's (meta is fine); StateError if this rank is not a member of the mesh.
  static DTensor from_local(at::Tensor local, DeviceMesh mesh, std::vector<Placement> placements,
                            at::OptionalIntArrayRef sizes = {}, at::OptionalIntArrayRef strides = {});

  const DeviceMesh& mesh() const;
  /// One per mesh dimension; a Shard's dimension is never negative.
  const std::vector<Placement>& placements() const;
  /// This rank's piece, an ordinary tensor; it shares memory with what it was made from. A piece of a DTensor that requires
  /// grad has a history; `grad_placements`: how its gradient is placed, by default as this tensor, Replicate where that is Partial.
  /// Throws UsageError for a view that has no piece: one that joins or cuts a sharded dimension.
  at::Tensor to_local(std::vector<Placement> grad_placements = {}) const;
  /// Which elements of the whole, in row-major order, this rank's piece holds, in the order of `to_local()` read
  /// row-major. Ranges of no elements are left out, adjacent ones joined. No communication.
  std::vector<ElementRange> element_ranges() const;

  /// The same tensor with other placements on the same mesh: a collective call, which all ranks make with the
  /// same arguments. Any sizes, even or not, and any dtype. What each mesh dimension communicates (its
  /// ranks: W), all others being equal:
  ///
  ///   Shard -> Replicate            one all-gather of the pieces, padded to the largest
  ///   Shard -> another Shard        the same, and the rest is dropped (no Communicator has an all-to-all)
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
  /// A StridedShard communicates as a Shard does. Where several mesh dimensions change at once, reductions come
  /// first; then, of all sets and orders of all-gathers that bring every rank what it needs, the one that
  /// moves the fewest bytes, each all-gather leaving out what none of its ranks need any more. Mesh dimensions
  /// of one rank and pieces without elements communicate nothing. A Partial sum of bool is an "or".
  /// Meta stays meta and communicates nothing.
  ///
  /// The result shares memory with this piece only where no rank had to move or drop anything.
  ///
  /// Gradients: with autograd on and a tensor that requires grad, the result has a
  /// history; its backward redistributes the gradient back and is a collective call too. It can itself be
  /// differentiated. Gradients are taken to be placed as the result, but replicated where that is Partial,
  /// and this tensor's gradient comes back the same way. `grad_placements` says otherwise: the
  /// same as the result's where that shards, elsewhere Replicate or Partial(sum), for ranks whose gradients
  /// are summands of the true one.
  ///
  /// Throws UsageError, before any communication, for placements that from_local would refuse,
  /// `grad_placements` of another kind, a maximum or minimum of complex numbers, and for changes
  /// from or to Partial(max) or Partial(min) that autograd would record: these have no local gradient.
  DTensor redistribute(std::vector<Placement> placements, std::vector<Placement> grad_placements = {}) const;

  /// The whole tensor with its global strides, on every rank: redistribute to Replicate everywhere, in what it
  /// communicates, in gradients and in `grad_placements`. A collective call unless every mesh dimension
  /// replicates. Shares memory with the local piece where that is the whole already.
  at::Tensor full_tensor(std::vector<Placement> grad_placements = {}) const;
};

bool is_dtensor(const at::Tensor& tensor);
/// This rank's piece of a DTensor, outside autograd; any other tensor is returned as it is.
at::Tensor to_local(const at::Tensor& tensor);

/// Spreads `tensor`, which every rank holds, over `mesh`: each rank keeps its own piece, a copy on the
/// mesh's device that requires grad if `tensor` does.
/// With `kBroadcastFromRank0` the values of the mesh's first rank win, and it is a collective call;
/// otherwise no communication.
/// Throws as DTensor::from_local does, and UsageError for a Partial placement.
enum class DistributeSource { kEachRankHasIt, kBroadcastFromRank0 };
DTensor distribute_tensor(const at::Tensor& tensor, DeviceMesh mesh,
                          std::vector<Placement> placements,
                          DistributeSource source = DistributeSource::kEachRankHasIt);

}  // namespace fsdp
