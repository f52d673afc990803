#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "fsdp/communicator.hpp"

namespace fsdp {

/// A communicator whose sums can multiply what each rank brings by a factor, in the collective itself: gradients
/// are averaged without a kernel before or after it (NCCL's pre-multiplied sum).
///
/// The product is rounded to the dtype before it is added, and so is the factor: an average over 3 ranks in
/// bfloat16 is off by up to 2^-9, as c10d's is, while powers of two are exact in every dtype.
class HasScaledSums {
 public:
  virtual bool scales_sums(at::ScalarType dtype) const = 0;

  /// One launch for all pairs, each as in `Communicator::start_reduce_scatter`: the sum of every rank's
  /// scale * input. Throws UsageError for a dtype that `scales_sums` denies.
  virtual std::shared_ptr<Work> start_scaled_reduce_scatter(std::span<const at::Tensor> outputs,
                                                            std::span<const at::Tensor> inputs, double scale,
                                                            std::string_view subject) = 0;
  /// In place, as `Communicator::start_all_reduce`.
  virtual std::shared_ptr<Work> start_scaled_all_reduce(const at::Tensor& tensor, double scale,
                                                        std::string_view subject) = 0;

 protected:
  ~HasScaledSums() = default;
};

/// Of NCCL's pre-multiplied sums, through whatever they are reached.
inline bool nccl_scales_sums(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16;
}

/// Null if sums of `dtype` are to be divided by the caller.
inline HasScaledSums* scaled_sums_of(Communicator& group, at::ScalarType dtype) {
  auto* scaled = dynamic_cast<HasScaledSums*>(&group);
  return scaled != nullptr && scaled->scales_sums(dtype) ? scaled : nullptr;
}

}  // namespace fsdp
