#pragma once

#include <functional>
#include <string>
#include <vector>

#include "late_ranks.hpp"
#include "support/models.hpp"

namespace fsdp::test {

/// A rank's part of a narrow weight is packed with others; that of a wide one travels from where it is.
inline constexpr int64_t kNarrow = 24, kWide = 256;

inline constexpr int64_t kBatch = 4;
inline constexpr double kLearningRate = 0.05;

/// A chain that is trained on late devices, and the same one that is trained on the host, unsharded.
struct LateTraining {
  int layers = 4;
  int64_t width = kNarrow;
  int steps = 5;
  int micro_batches = 1;
  bool uses_adam = false;
  double relative = 1e-5;            ///< of the largest element
  std::vector<int64_t> mesh = {};    ///< (shard) or (replicate, shard); empty: all ranks shard
  FullyShardOptions options = {};    ///< but for the mesh
  bool runs_on_side_stream = false;  ///< not on the device's default stream
  bool waits_in_steps = false;       ///< else no step but the first two may let the host wait
  /// Called once everything is sharded; in front of each backward; behind each step of the optimizer.
  std::function<void(ShardedChain&)> control = {};
  std::function<void(ShardedChain&, int micro_batch)> before_backward = {};
  std::function<void(ShardedChain&)> after_backward = {};  ///< the last of a step
  std::function<void(ShardedChain&)> after_step = {};
};

struct PlainTraining {
  std::vector<at::Tensor> losses;  ///< by step, micro-batch and rank
  NamedTensors gradients;          ///< of the last step, averaged
  NamedTensors parameters;
};
PlainTraining train_plain(const LateTraining& training, int ranks);

/// Throws UsageError, beginning with `what`, where they differ by more than `relative` of the largest expected element.
void expect_close(const at::Tensor& actual, const at::Tensor& expected, double relative, const std::string& what);

at::Tensor input_of(const LateTraining& training, int rank, int step, int micro_batch);
ShardedChain sharded_chain(const LateRank& rank, const LateTraining& training);
/// Throws UsageError saying what differs from `plain`: parameters, and the last step's gradients.
void expect_like_plain(const torch::nn::Module& model, const LateTraining& training, const PlainTraining& plain);

/// Throws UsageError saying what differs from `plain`. Reads nothing before all steps are queued.
void train_late(LateRank& rank, const LateTraining& training, const PlainTraining& plain);

/// On worlds and with seeds for delays; what ranks found wrong, one line each.
std::vector<std::string> wrong_on_late(const LateTraining& training, const LateRanksOptions& options);

}  // namespace fsdp::test
