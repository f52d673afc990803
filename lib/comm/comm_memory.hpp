#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "fsdp/communicator.hpp"
#include "fsdp/custom_comm.hpp"

namespace fsdp {

/// A communicator whose backend may have an allocator of its own.
class HasCommMemory {
 public:
  /// 1-D, not initialised; undefined where the backend has no memory for that device.
  virtual at::Tensor allocate_for_comm(int64_t numel, const at::TensorOptions& options) = 0;

 protected:
  ~HasCommMemory() = default;
};

/// Memory from the group's backend if it has any, else undefined.
at::Tensor allocate_for_comm(Communicator& group, int64_t numel, const at::TensorOptions& options);

/// The group's own collectives, in memory of its backend where that has any; elsewhere in LibTorch's.
std::shared_ptr<AllGatherComm> process_group_all_gather(std::shared_ptr<Communicator> group);
std::shared_ptr<ReduceScatterComm> process_group_reduce_scatter(std::shared_ptr<Communicator> group);
/// True for what the two above have made.
bool is_process_group_comm(const Comm* comm);

}  // namespace fsdp
