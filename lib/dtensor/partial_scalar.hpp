#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "fsdp/communicator.hpp"

namespace fsdp {

/// How the ranks' results of a reduction become one.
struct Combination {
  enum class Kind { kSum, kProd, kMax, kMin, kAny, kAll, kNorm };
  Kind kind = Kind::kSum;
  double p = 2;             ///< of a norm
  int64_t divisor = 1;      ///< what the sum is divided by: a mean
  at::ScalarType dtype = at::kFloat;  ///< of the result
  bool operator==(const Combination&) const = default;

  /// all: [ranks, ...], of the dtype that ranks computed in. Returns [...].
  at::Tensor combine(const at::Tensor& all) const;
  /// Returns what changes nothing, for a rank without elements: a tensor of these sizes.
  at::Tensor neutral(c10::IntArrayRef sizes, const at::TensorOptions& options) const;
};

/// Note [Partial scalars]
/// What a full reduction (a norm, a sum, a maximum) of a DTensor returns: this rank's part, until somebody reads the scalar.
/// Then one all-gather takes the parts of all scalars over the same ranks that wait, so that a loop over parameters, such as
/// LibTorch's clip_grad_norm_, communicates once. Those that nobody holds any more go with them: which ones there are
/// follows from the program, and not from when a rank lets go of them. When 4,096 wait, they are reduced.
class PartialScalar {
 public:
  using Ptr = std::shared_ptr<PartialScalar>;

  /// part: 0-dim. groups: over which it is combined, innermost first; one at least.
  static Ptr wait(at::Tensor part, Combination combination, std::vector<std::shared_ptr<Communicator>> groups,
                  std::string subject);

  /// Returns the scalar, an ordinary 0-dim tensor, the same one each time. A collective call the first time, for all that wait.
  const at::Tensor& read();
  at::ScalarType dtype() const { return combination_.dtype; }
  c10::Device device() const { return part_.device(); }

  PartialScalar(at::Tensor part, Combination combination, std::string subject)
      : part_(std::move(part)), combination_(combination), subject_(std::move(subject)) {}

 private:
  class Queue;

  at::Tensor part_, value_;
  Combination combination_;
  std::string subject_;
  std::shared_ptr<Queue> queue_;  // until it is read
};

/// Gathers everybody's `part`: [ranks over all groups, ...], the last group's ranks outermost. A collective call.
at::Tensor gather_parts(const at::Tensor& part, const std::vector<std::shared_ptr<Communicator>>& groups,
                        std::string_view subject);

}  // namespace fsdp
