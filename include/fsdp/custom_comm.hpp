#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string_view>

#include "fsdp/api.hpp"
#include "fsdp/communicator.hpp"

namespace fsdp {

/// A custom collective and the allocator of its buffers: FSDP2's Comm. Derive from AllGatherComm or ReduceScatterComm and
/// override what should differ.
///
/// One object may serve several groups. A root calls it from one thread at a time. It is not called for groups of one rank.
class FSDP_API Comm {
 public:
  virtual ~Comm() = default;

  /// Returns a buffer: 1-D, contiguous, `numel` elements of the dtype and device in `options`, aligned to 16 bytes,
  /// uninitialised. Default: at::empty.
  ///
  /// It may return the same memory again only once nothing else refers to the tensor. Several collectives run at a time, and
  /// the output of a reduce-scatter becomes the gradients.
  virtual at::Tensor allocate(int64_t numel, const at::TensorOptions& options);
};

/// A group's all-gather, in place of its communicator's own (`FSDPModule::set_custom_all_gather`).
///
/// The group is then gathered by one collective of one packed buffer, in place: this rank's pieces are copied into its part of
/// the output, and the unsharded parameters are copied out of the output.
class FSDP_API AllGatherComm : public Comm {
 public:
  /// Launches the collective. Returns the Work that waits for it; null if it is done. Default: group.start_all_gather.
  ///
  /// output: 1-D uint8, from `allocate`, group.size() times as long as `input`.
  /// input: this rank's part of `output`.
  /// group: the ranks that hold the pieces. In backward with an integer reshard_after_forward: that many ranks.
  /// subject: the group's name.
  virtual std::shared_ptr<Work> start_all_gather(const at::Tensor& output, const at::Tensor& input,
                                                 Communicator& group, std::string_view subject);
};

/// A group's reduce-scatter, in place of its communicator's own (`FSDPModule::set_custom_reduce_scatter`).
///
/// All gradients of one reduce dtype are then packed into one buffer from `allocate`.
class FSDP_API ReduceScatterComm : public Comm {
 public:
  /// Launches the collective. Returns the Work that waits for it; null if it is done. Default: group.start_reduce_scatter.
  ///
  /// output, input: 1-D, in the reduce dtype, from `allocate`; input is group.size() times as long. Both are kept until the
  /// Work
  ///   has been waited for.
  virtual std::shared_ptr<Work> start_reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                                     ReduceOp op, Communicator& group,
                                                     std::string_view subject);
};

}  // namespace fsdp
