#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/device_mesh.hpp"
#include "fsdp/local_ranges.hpp"
#include "fsdp/placement.hpp"
#include "tensor/local_piece.hpp"
#include "tensor/piece_map.hpp"
#include "tensor/redistribute.hpp"

namespace fsdp {

/// How a tensor is spread over a mesh, and which piece of it this rank holds: torch's DTensorSpec. All but the pieces of 0-dim
/// tensors follows from what is the same on all ranks. Immutable; tensors that are placed alike share one.
class DTensorSpec {
 public:
  using Ptr = std::shared_ptr<const DTensorSpec>;

  /// placements: normalised. strides: of the whole, dense. name: of a parameter, for what collectives are called.
  DTensorSpec(DeviceMesh mesh, std::vector<Placement> placements, std::vector<int64_t> sizes, std::vector<int64_t> strides,
              std::string name = "");
  /// Of a piece, as DTensor::from_local has it. Throws UsageError, beginning with `subject`.
  static Ptr of_local(const at::Tensor& local, DeviceMesh mesh, std::vector<Placement> placements,
                      at::OptionalIntArrayRef sizes, at::OptionalIntArrayRef strides, std::string_view subject);
  /// The same mesh and name, another tensor. Row-major unless strides are given.
  Ptr of(std::vector<int64_t> sizes, std::vector<Placement> placements, at::OptionalIntArrayRef strides = {}) const;

  const DeviceMesh& mesh() const { return mesh_; }
  const std::vector<Placement>& placements() const { return placements_; }
  const std::vector<int64_t>& sizes() const { return sizes_; }
  const std::vector<int64_t>& strides() const { return strides_; }
  const std::string& name() const { return name_; }
  int64_t ndim() const { return static_cast<int64_t>(sizes_.size()); }
  int64_t numel() const { return numel_; }
  /// This rank's.
  const LocalPiece& piece() const { return piece_; }

  bool has_partial() const { return has_partial_; }
  /// Every rank holds all elements, and none a summand.
  bool is_replicated() const { return !has_partial_ && cut_.none(); }
  /// The mesh dimensions of several ranks that cut `dim`; of a 0-dim tensor: 0.
  MeshDims cutting(int64_t dim) const { return map_.cutting(dim); }
  bool is_cut(int64_t dim) const { return cut_dims_[static_cast<size_t>(dim)]; }
  /// Equal sizes and placements on one mesh: ranks hold the same elements of both.
  bool is_placed_as(const DTensorSpec& other) const;

  /// From everybody's pieces, with this tensor's strides, on every rank, outside autograd: may be `local` itself. A collective
  /// call, unless replicated.
  at::Tensor gather(const at::Tensor& local, std::string_view operation) const;
  /// This rank's piece of a tensor of these sizes, which all ranks hold; may share its memory.
  at::Tensor part_of(const at::Tensor& whole) const;
  /// The same in memory of its own, laid out as the whole is.
  at::Tensor own_part_of(const at::Tensor& whole) const;
  /// The way from these placements to others.
  Redistribution way_to(std::vector<Placement> placements, std::string_view operation) const;

 private:
  DeviceMesh mesh_;
  std::vector<Placement> placements_;
  std::vector<int64_t> sizes_, strides_;
  std::string name_;
  int64_t numel_;
  PieceMap map_;
  LocalPiece piece_;
  MeshDims cut_;                // mesh dimensions that cut anything
  std::vector<bool> cut_dims_;  // by tensor dimension
  bool has_partial_ = false;
};

}  // namespace fsdp
