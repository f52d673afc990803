#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/testing/recording.hpp"
#include "property/byte_formula.hpp"
#include "support/twin.hpp"

namespace fsdp::test {

/// Follows one rank's run from after fully_shard on; what it returns checks, after the last step:
///
/// - each gather and reduction moved what the formula says, for the parameters that got gradients
/// - the statistics are the sums of those, and of (W-1)/W and 2 (R-1)/R of them
/// - the runtime allocated what its statistics planned, to the byte (not under FSDP_SANITIZE, whose late
///   delivery needs memory of its own)
/// on_range: is also told of each range of the library.
std::function<void()> watch_run(Rank& rank, const std::shared_ptr<torch::nn::Module>& module,
                                std::shared_ptr<const std::vector<PlainGroup>> groups, const Training& training,
                                std::function<void(std::string_view)> on_range);

/// What a group's collectives are called.
std::string subject_of(const PlainGroup& group);

/// To be called where the loss of a micro-batch begins: which sums wait for replicas depends on it.
void note_micro_batch(CallLog& log, int index);

/// While it lives, the collectives that no group makes are the program's own, on DTensors: they stay out of the log.
std::shared_ptr<void> own_collectives(CallLog& log, std::shared_ptr<const std::vector<PlainGroup>> groups);

/// To be called where a parameter is frozen or thawed, between steps.
void note_trainable(CallLog& log, const std::vector<PlainGroup>& groups, const at::Tensor& handle, bool is_trainable);

/// Where it is unlike what it was: between steps. Before the first, gradients go as the policy says.
void note_gradient_dtypes(CallLog& log, const std::vector<PlainGroup>& groups, const at::Tensor& handle,
                          const GradientDtypes& dtypes);

}  // namespace fsdp::test
