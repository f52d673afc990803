#pragma once

#include "sharded_module/sharded_module.hpp"

namespace fsdp::python {

/// The core's local shards of these roots, each as a dictionary of shard, label, module and parts, these as
/// dictionaries of name, parameter (the DTensor), offset and numel. label: (name, parameter) -> str, or None.
/// From then on the DTensors show the memory and the gradients that the shards alias.
py::list local_shards(const std::vector<std::shared_ptr<ShardedModule>>& roots, const py::object& label);

/// The core's: of local shards, the package's DTensors and plain tensors. Returns the global norm.
/// Throws TypeError for a DTensor that is not of a module sharded by this package.
at::Tensor clip_grad_norm(const py::iterable& parameters, double max_norm, double norm_type, bool error_if_nonfinite);

}  // namespace fsdp::python
