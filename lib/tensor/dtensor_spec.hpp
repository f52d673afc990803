#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/device_mesh.hpp"
#include "fsdp/local_ranges.hpp"
#include "fsdp/placement.hpp"
#include "tensor/local_piece.hpp"
#include "tensor/piece_map.hpp"
#include "tensor/redistribute/redistribute.hpp"
#include "tensor/shard_layout.hpp"

namespace fsdp {

/// How a tensor is spread over a mesh, and which piece of it this rank holds: torch's DTensorSpec. All but the pieces of 0-dim
/// tensors follows from what is the same on all ranks. Immutable; tensors that are placed alike share one.
class DTensorSpec {
 public:
  using Ptr = std::shared_ptr<const DTensorSpec>;
  struct Flat {
    ShardLayout layout;
    std::shared_ptr<Communicator> group;
    bool operator==(const Flat&) const = default;
  };

  /// placements: normalised. strides: of the whole, dense. name: of a parameter, for what collectives are called.
  DTensorSpec(DeviceMesh mesh, std::vector<Placement> placements, std::vector<int64_t> sizes, std::vector<int64_t> strides,
              std::string name = "");
  /// Makes the spec of a flat layout: `group`, a group of the mesh, cuts the elements as they lie in memory, and pieces are
  /// 1-D.
  DTensorSpec(DeviceMesh mesh, ShardLayout layout, std::shared_ptr<Communicator> group, std::string name);
  const DeviceMesh& mesh() const { return mesh_; }
  /// One for each mesh dimension; of a flat layout, which is none, Replicate.
  const std::vector<Placement>& placements() const { return placements_; }
  bool is_flat() const { return flat_.has_value(); }
  const std::optional<Flat>& flat() const { return flat_; }
  const std::vector<int64_t>& sizes() const { return sizes_; }
  const std::vector<int64_t>& strides() const { return strides_; }
  const std::string& name() const { return name_; }
  /// Changes the name, the one thing that may change: modules find out late what they are called.
  void rename(std::string name) const;
  /// What an error says to whoever asks for the memory of a tensor that is spread so.
  const std::string& memory_error() const { return memory_error_; }
  int64_t ndim() const { return static_cast<int64_t>(sizes_.size()); }
  int64_t numel() const { return numel_; }
  /// Returns this rank's piece.
  const LocalPiece& piece() const { return piece_; }

  bool has_partial() const { return has_partial_; }
  /// Every rank holds all elements, and none a summand.
  bool is_replicated() const { return !has_partial_ && !is_flat() && std::ranges::find(cut_dims_, true) == cut_dims_.end(); }
  /// True if the dimension is cut, as every one is in a flat layout. A 0-dim tensor has dimension 0 here.
  bool is_cut(int64_t dim) const { return is_flat() || cut_dims_[static_cast<size_t>(dim)]; }
  /// Returns the groups of several ranks that hold different indices of any of these dimensions, those of the last mesh
  /// dimension first.
  std::vector<std::shared_ptr<Communicator>> groups_cutting(c10::IntArrayRef dims) const;
  /// True for equal sizes and placements on one mesh: ranks hold the same elements of both.
  bool is_placed_as(const DTensorSpec& other) const { return this == &other || is_equal(other); }

 private:
  bool is_equal(const DTensorSpec& other) const;

  DeviceMesh mesh_;
  std::vector<Placement> placements_;
  std::vector<int64_t> sizes_, strides_;
  mutable std::string name_, memory_error_;
  int64_t numel_;
  PieceMap map_;
  LocalPiece piece_;
  std::vector<bool> cut_dims_;  // by tensor dimension
  bool has_partial_ = false;
  std::optional<Flat> flat_;
};

/// Makes the spec of another tensor on the mesh of `like`, with its name. Row-major unless strides are given.
DTensorSpec::Ptr spec_like(const DTensorSpec& like, std::vector<int64_t> sizes, std::vector<Placement> placements,
                           at::OptionalIntArrayRef strides = {});
/// Makes the spec of the tensor of which this rank has the piece `local`, as DTensor::from_local says. Throws UsageError,
/// beginning with `subject`.
DTensorSpec::Ptr spec_of_local(const at::Tensor& local, DeviceMesh mesh, std::vector<Placement> placements,
                               at::OptionalIntArrayRef sizes, at::OptionalIntArrayRef strides, std::string_view subject);

/// Returns Replicate for each mesh dimension: how the full tensor is placed.
std::vector<Placement> replicated_everywhere(const DTensorSpec& spec);
/// Returns the way from these placements to others.
Redistribution way_to(const DTensorSpec& spec, std::vector<Placement> placements, std::string_view operation);
/// Returns this rank's piece of `whole`, a tensor of the spec's sizes that all ranks hold; may share its memory.
at::Tensor part_of(const DTensorSpec& spec, const at::Tensor& whole);
/// Returns this rank's piece of `whole` in memory of its own, laid out as the whole is.
at::Tensor copy_part_of(const DTensorSpec& spec, const at::Tensor& whole);

}  // namespace fsdp
