#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tensor/dtensor_spec.hpp"
#include "tensor/shard_layout.hpp"
#include "tensor/tensor_part.hpp"

namespace fsdp {

/// What one parameter is, and which rows of it this rank holds.
struct ParamSpec {
  std::string name;
  ShardLayout layout;  ///< of the unsharded parameter's sizes and strides
  int rank = 0;        ///< in the shard group
  at::ScalarType dtype = at::kFloat;        ///< that it is kept in: the sharded parameter's
  at::ScalarType param_dtype = at::kFloat;  ///< that it is gathered and computed in: the unsharded parameter's
  std::optional<at::ScalarType> asked_param_dtype = {};  ///< that stays when `dtype` changes
  /// Operators that use it give their outputs in this dtype; none: as they are.
  std::optional<at::ScalarType> output_dtype = {};
  ParamReach reach = {};  ///< beyond the group's ranks
  /// How it is registered: as a DTensor; null: as this rank's rows.
  DTensorSpec::Ptr dtensor = {};
  /// Sizes and strides of this rank's rows. They follow from the layout, and are kept as every step asks for them.
  at::DimVector local_sizes = {}, local_strides = {};

  bool is_cast() const { return param_dtype != dtype; }
  /// The whole parameter's sizes and strides in memory.
  const std::vector<int64_t>& sizes() const { return layout.sizes(); }
  const std::vector<int64_t>& strides() const { return layout.strides(); }
  int64_t itemsize() const { return static_cast<int64_t>(c10::elementSize(dtype)); }
  /// Bytes of the whole parameter in the dtype that is gathered.
  int64_t unsharded_bytes() const { return layout.numel() * static_cast<int64_t>(c10::elementSize(param_dtype)); }
  /// Bytes of this rank's rows, without padding.
  int64_t local_bytes() const { return layout.local_numel(rank) * itemsize(); }
};

}  // namespace fsdp
