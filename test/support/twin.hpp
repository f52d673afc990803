#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/inputs.hpp"
#include "support/ranks.hpp"
#include "support/training_code.hpp"

namespace fsdp::test {

/// Of one parameter's gradient, once it has left autograd.
struct GradientDtypes {
  at::ScalarType reduced_in, kept_in;
};

/// `Workload::shard` has checked that its model is refused as it has to be. The run ends there, and all was well.
struct RefusedAsExpected : std::exception {};

/// A model, how a user shards it and what it is trained on.
struct Workload {
  std::shared_ptr<torch::nn::Module> module;
  /// Calls fully_shard where the user would, with these options (the mesh among them).
  std::function<void(const FullyShardOptions&)> shard;
  std::function<at::Tensor(Inputs&)> loss;
  /// Called on a rank once the model is sharded; what it returns, after the last step.
  std::function<std::function<void()>(Rank&)> watch = {};
  /// Called before each step, on the plain model too. What it returns is compared.
  std::function<std::vector<at::Tensor>(int step)> before_step = {};
  /// What gradient hooks that `watch` registers do to the averaged gradients, done to those of the plain model.
  std::function<void()> after_average = {};
  /// Called on a rank before `shard`, by all ranks together: makes the module this rank's part of the plain one,
  /// and the options those of its meshes.
  std::function<void(const Rank&, FullyShardOptions&)> localize = {};
  /// Over how many ranks the gradient of a plain parameter is averaged; unset: all that see other batches.
  std::function<int(const at::Tensor& parameter)> averaged_over = {};
  /// What of the plain model's tensor this rank's parameter holds, 1-D in its order; unset: as `local_ranges` says.
  std::function<at::Tensor(const Rank&, const at::Tensor& parameter, const at::Tensor& whole)> own_part = {};
  /// In this step, of a parameter as the module's member holds it; unset: what the policy says. The plain model's
  /// gradients are rounded like that in `after_average`.
  std::function<GradientDtypes(const at::Tensor& parameter)> gradient_dtypes = {};
  /// None: adamw_code.
  std::shared_ptr<TrainingCode> code = {};
};
using MakeWorkload = std::function<Workload()>;

/// What most workloads do: fully_shard on each, inner modules first.
inline auto shard_each(std::vector<std::shared_ptr<torch::nn::Module>> modules) {
  return [modules = std::move(modules)](const FullyShardOptions& options) {
    for (auto& module : modules) fully_shard(*module, options);
  };
}
/// The same for all of a list's elements and the module around it.
inline auto shard_each(const torch::nn::ModuleList& list, const std::shared_ptr<torch::nn::Module>& around) {
  std::vector<std::shared_ptr<torch::nn::Module>> modules(list->begin(), list->end());
  modules.push_back(around);
  return shard_each(std::move(modules));
}

enum class Accumulation {
  kReduceEach,     ///< every micro-batch is reduced, sharded gradients add up
  kSyncAtLast,     ///< set_requires_gradient_sync(false) until the last
  kAllReduceLast,  ///< set_requires_all_reduce(false) until the last (HSDP)
  kLastBackward,   ///< set_is_last_backward(false) until the last
};

struct Training {
  int world_size = 2;    ///< that see different batches
  int tensor_ranks = 1;  ///< for each of those; the mesh is the workload's then
  int replicas = 0;  ///< 0: a 1-D mesh; else a mesh of (replicas, world_size / replicas)
  bool replicate_only = false;
  int steps = 3;
  int micro_batches = 1;
  Accumulation accumulation = Accumulation::kReduceEach;
  ReshardAfterForward reshard_after_forward = {};
  int prefetch_distance = 1;
  /// Reductions have a communicator of their own, and start like this.
  std::optional<ReduceScatterStart> separate_reductions = {};
  std::optional<double> max_norm = {};
  bool reduce_unused = false;  ///< set_reduce_scatter_unused_params
  at::ScalarType dtype = at::kFloat;
  uint64_t seed = 17;  ///< of the weights
  bool weight_decay = true;
  /// It divides by what may be small: the tolerance is at least what a rounding of the first weights grows to.
  bool is_delicate = false;
  bool launches_batches = false;  ///< the world offers grouped launches, as NCCL does
  int64_t packs_below = 0;        ///< of those launches
  /// The smallest byte budget that the root accepts, times this.
  std::optional<double> budget_factor = {};
  /// The policy's; with another param_dtype the batches come in that one.
  std::optional<at::ScalarType> param_dtype = {}, reduce_dtype = {};
  bool casts_inputs = true;       ///< the policy's cast_forward_inputs
  bool rounds_gradients = false;  ///< some are kept in float, whatever the model is in
  /// The rest of the options, such as the layout.
  std::function<void(FullyShardOptions&)> adjust = {};

  int64_t shard_ranks() const { return replicate_only ? 1 : replicas > 0 ? world_size / replicas : world_size; }
  /// In 16 bits both models compute: what they round, they round alike. See LowTwin.
  bool is_low() const { return param_dtype && c10::elementSize(*param_dtype) == 2; }
  /// Where the parameter says nothing of its own.
  GradientDtypes gradient_dtypes() const {
    return {.reduced_in = reduce_dtype.value_or(param_dtype.value_or(dtype)), .kept_in = dtype};
  }
  /// A policy that computes in float is compared with a model that does not.
  double tolerance() const {
    if (param_dtype && !is_low()) return 1e-4;
    return is_low() || rounds_gradients || dtype == at::kFloat ? 1e-5 : 1e-11;
  }
};

/// What the plain model did when each rank's batch was run separately and gradients averaged.
struct PlainRecord {
  struct Step {
    std::vector<at::Tensor> before;  ///< what `before_step` has returned
    std::vector<std::vector<at::Tensor>> losses;  ///< [rank][micro-batch]
    NamedTensors gradients;                       ///< before clipping; undefined where none
    NamedTensors magnitudes;  ///< in 16 bits: of the terms that a gradient is the sum of, averaged like it
    at::Tensor penalty;    ///< as a number; undefined: none
    std::optional<double> norm;
    NamedTensors weights;  ///< after the optimizer
    std::vector<TrainingCode::Kept> kept;
    double tolerance = 0;
    double kept_tolerance = 0;  ///< of what the optimizer keeps: it may divide by the roots of small squares
  };
  NamedTensors first_weights;
  std::vector<Step> steps;
  std::vector<std::vector<at::Tensor>> buffers;  ///< [rank], after the last step
};

/// The rows of `full` that rank `index` of `ranks` holds: chunks of ceil(n / ranks).
at::Tensor rows_of(const at::Tensor& full, int64_t index, int64_t ranks);

/// What this rank holds of a parameter's values or gradient `full`, 1-D, as `local_ranges` says; all of
/// it for a parameter that is not sharded.
at::Tensor local_elements(const at::Tensor& parameter, const at::Tensor& full);

Workload make_seeded(const MakeWorkload& make, const Training& training);
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const torch::nn::Module& module, const Training& training);

PlainRecord train_plain(const MakeWorkload& make, const Training& training);

/// Trains the sharded model on this rank and compares every loss, gradient, norm, weight and buffer.
void train_sharded(Rank& rank, const MakeWorkload& make, const Training& training, const PlainRecord& plain);

/// Both of the above on all ranks. True if all was well.
bool trains_like_plain(const MakeWorkload& make, const Training& training = {});

}  // namespace fsdp::test
