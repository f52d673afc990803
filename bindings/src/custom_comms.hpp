#pragma once

#include "sharded_module/sharded_module.hpp"

namespace fsdp::python {

/// FSDP2's set_custom_all_gather, set_custom_reduce_scatter and set_all_reduce_hook on a module's own groups.
/// comm, hook: objects of FSDP2's interface AllGather, ReduceScatter or (tensor) -> None; None: the library's own.
/// process_group: (world ranks) -> the process group over them, which FSDP2's interface hands to a comm.
void set_custom_all_gather(ShardedModule& module, py::object comm, py::object process_group);
void set_custom_reduce_scatter(ShardedModule& module, py::object comm, py::object process_group);
void set_all_reduce_hook(ShardedModule& module, py::object hook);

/// For each of a module's own groups (ranks that it shards over, all-gather, reduce-scatter, only sums, reduce-scatters'
/// buffers). A comm is None for the library's own, what Python has set, or the string "memory from the process group".
py::list group_comms(ShardedModule& module);

}  // namespace fsdp::python
