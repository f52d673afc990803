#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string_view>

#include "fsdp/communicator.hpp"

namespace fsdp {

/// Where the buffers of a group's collective come from: FSDP2's Comm. Derive from AllGatherComm or
/// ReduceScatterComm and override what is to differ.
///
/// One object may serve several groups; a root calls it from one thread at a time. It is not asked where
/// one rank makes the group: there is no collective then.
class Comm {
 public:
  virtual ~Comm() = default;

  /// Memory for one buffer: 1-D, contiguous, `numel` elements as `options` say, aligned to 16 bytes,
  /// not initialised.
  ///
  /// A buffer may be given again only when nobody else refers to its tensor: several collectives
  /// are under way at a time (a group is gathered ahead while another one is unpacked), and the output of a
  /// reduce-scatter becomes the gradients. By default: at::empty.
  virtual at::Tensor allocate(int64_t numel, const at::TensorOptions& options);
};

/// A group's all-gather, in place of its communicator's own (`FSDPModule::set_custom_all_gather`).
///
/// With one of these a group is gathered by one collective of one packed buffer, in place: this rank's
/// pieces are copied into their part of the output, and the unsharded parameters out of it.
class AllGatherComm : public Comm {
 public:
  /// Launches the collective and returns what waits for it; null if it is done.
  /// output: 1-D bytes from `allocate`, group.size() times as long as `input`.
  /// input: this rank's part of `output`.
  /// group: the ranks that hold the pieces: after forward with an integer reshard_after_forward, those.
  /// subject: the group's name. By default: group.start_all_gather.
  virtual std::shared_ptr<Work> start_all_gather(const at::Tensor& output, const at::Tensor& input,
                                                 Communicator& group, std::string_view subject);
};

/// A group's reduce-scatter, in place of its communicator's own (`FSDPModule::set_custom_reduce_scatter`).
///
/// With one of these all gradients of one reduce dtype are packed in one buffer from `allocate`.
class ReduceScatterComm : public Comm {
 public:
  /// Launches the collective and returns what waits for it; null if it is done.
  /// output, input: 1-D in the reduce dtype, from `allocate`; input is group.size() times as long. Both stay
  ///   referenced until the Work has been waited for.
  /// By default: group.start_reduce_scatter.
  virtual std::shared_ptr<Work> start_reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                                     ReduceOp op, Communicator& group,
                                                     std::string_view subject);
};

}  // namespace fsdp
