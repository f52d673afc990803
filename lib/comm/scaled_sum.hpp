#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "fsdp/communicator.hpp"

namespace fsdp {

/// The sum of every rank's scale * values.
struct ScaledSum {
  at::ScalarType dtype = at::kFloat;
  double scale = 1;
  bool reads_slot = false;  ///< the values lie in a slot (comm_memory.hpp), which is to make the collective faster
};

/// A communicator whose sums can multiply what each rank brings by a factor, in the collective itself: gradients
/// are averaged without a kernel before or after it.
///
/// The product is rounded to the dtype before it is added, and so is the factor: an average over 3 ranks in
/// bfloat16 is off by up to 2^-9, as c10d's is, while powers of two are exact in every dtype.
class HasScaledSums {
 public:
  /// False: it cannot, or a sum that the caller divides is faster. The same on all ranks.
  virtual bool scales_sums(const ScaledSum& sum) const = 0;

  /// Launches all pairs at once, each as in `Communicator::start_reduce_scatter`: the sum of every rank's scale * input. Throws
  /// UsageError for a dtype or a scale that `scales_sums` denies in any memory.
  virtual std::shared_ptr<Work> start_scaled_reduce_scatter(std::span<const at::Tensor> outputs,
                                                            std::span<const at::Tensor> inputs, double scale,
                                                            std::string_view subject) = 0;
  /// Sums every rank's scale * tensor in place, as `Communicator::start_all_reduce` does.
  virtual std::shared_ptr<Work> start_scaled_all_reduce(const at::Tensor& tensor, double scale,
                                                        std::string_view subject) = 0;

 protected:
  ~HasScaledSums() = default;
};

/// Whether NCCL averages values of that dtype, or multiplies them, through whatever it is reached.
inline bool nccl_scales_sums(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16;
}

/// True if such a sum over the group is an average.
inline bool is_average(double scale, const Communicator& group) { return scale == 1.0 / group.size(); }

/// Returns the group's HasScaledSums, or null if the caller is to divide the sum.
inline HasScaledSums* scaled_sums_of(Communicator& group, const ScaledSum& sum) {
  auto* scaled = dynamic_cast<HasScaledSums*>(&group);
  return scaled != nullptr && scaled->scales_sums(sum) ? scaled : nullptr;
}

}  // namespace fsdp
