#pragma once

#include <memory>
#include <unordered_map>

#include "fsdp/fully_shard.hpp"
#include "mirror.hpp"
#include "py_ref.hpp"

namespace fsdp::python {

/// What the Python modules hold, by the tensor that the core sees of it. Empty after fully_shard, as the library
/// keeps functions that look here as long as the module lives.
using Originals = std::unordered_map<const c10::TensorImpl*, py::object>;

/// fully_shard's arguments as the Python side hands them over, already checked there.
struct ShardCall {
  FullyShardOptions options;
  std::optional<at::ScalarType> input_dtype, output_dtype;
  bool reduces_in_own_dtype = false;  ///< see ReduceOptions
  py::object apply_to_tensors;
};

/// placer: the Python side's, which has the mesh.
ShardCall shard_call(const py::object& placer, const py::dict& arguments, Mirrors& mirrors,
                     const std::shared_ptr<Originals>& originals);

}  // namespace fsdp::python
