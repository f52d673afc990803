#pragma once

#include "fsdp/fully_shard.hpp"
#include "py_ref.hpp"

namespace fsdp::python {

/// fully_shard's arguments as the Python side hands them over, already checked there.
struct ShardCall {
  FullyShardOptions options;
  std::optional<at::ScalarType> input_dtype, output_dtype;
  py::object apply_to_tensors;
};

ShardCall shard_call(const DeviceMesh& mesh, const py::dict& arguments);

}  // namespace fsdp::python
