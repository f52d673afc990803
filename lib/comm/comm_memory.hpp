#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "fsdp/communicator.hpp"
#include "fsdp/custom_comm.hpp"

namespace fsdp {

/// Which of a group's collectives a slot is for. Backends may register memory for these alone.
enum class SlotUse {
  kGathers,     ///< all-gathers write to it
  kReductions,  ///< reduce-scatters read from it
};

/// Memory of a slot, NCCL's symmetric memory: all ranks of a group have registered theirs together. Backends may write what a
/// rank gathers into its own directly from the other ranks, and read what a rank reduces directly from its own. The ranks must
/// use one slot, from the same place on, for one collective: which one is a decision that has to come out the same on all of
/// them.
///
/// Letting go of it takes the registration back, which waits for collectives of that use under way, so that all ranks
/// do it between the same two calls; the memory stays as long as a tensor refers to it.
class SymmMemBuffer {
 public:
  virtual ~SymmMemBuffer() = default;
  virtual int64_t bytes() const = 0;
  /// Returns the first `bytes`: 1-D, not initialised, to be written on the current stream from now on, which waits for what
  /// used the last tensor on the stream that let go of it. Throws StateError while that one is referred to.
  virtual at::Tensor take(int64_t bytes) = 0;
  virtual bool is_taken() const = 0;
};

/// A communicator whose backend may have an allocator of its own.
class HasCommMemory {
 public:
  /// Allocates memory: 1-D, not initialised; undefined where the backend has none for that device.
  virtual at::Tensor allocate_for_comm(int64_t numel, const at::TensorOptions& options) = 0;
  /// Says why no slot can ever be made, in a clause that begins with "which"; empty: it is found out by making one.
  virtual std::string why_no_slots() const;
  /// Makes a slot, by a collective call for which the host waits. Null where a rank or the driver has no such memory, which is
  /// said once in the log: on all ranks then. Throws CommError.
  virtual std::shared_ptr<SymmMemBuffer> make_slot(SlotUse use, int64_t bytes);

 protected:
  ~HasCommMemory() = default;
};

/// Allocates memory from the group's backend if it has any; else returns an undefined tensor.
at::Tensor allocate_for_comm(Communicator& group, int64_t numel, const at::TensorOptions& options);

/// These ask HasCommMemory of a group that has it. For any other group there are no slots: a reason, and null.
std::string why_no_slots(const Communicator& group);
std::shared_ptr<SymmMemBuffer> make_slot(Communicator& group, SlotUse use, int64_t bytes);

/// Return the group's own collectives, in memory of its backend where that has any; elsewhere in LibTorch's.
std::shared_ptr<AllGatherComm> process_group_all_gather(std::shared_ptr<Communicator> group);
std::shared_ptr<ReduceScatterComm> process_group_reduce_scatter(std::shared_ptr<Communicator> group);
/// True for what the two above have made.
bool is_process_group_comm(const Comm* comm);

}  // namespace fsdp
