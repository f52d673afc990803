#pragma once

#include <string>
#include <vector>

#include "checkpoints.hpp"
#include "data.hpp"
#include "execution.hpp"
#include "progress.hpp"

namespace llama {

struct TrainingResult {
  /// One a step, from the run's beginning: the mean over all ranks, in nats a byte.
  std::vector<double> losses;
  double tokens_per_second = 0;  ///< of all ranks together
};

/// Trains up to step `options.steps` from where `checkpoints` starts; every rank calls it with the
/// same arguments. Throws std::runtime_error if the loss is no longer finite, fsdp::CheckpointError
/// if a checkpoint cannot be saved.
TrainingResult train(LanguageModel& model, Execution& execution, const Corpus& corpus,
                     const TrainingOptions& options, Checkpoints& checkpoints, Progress& progress);

/// Bits that the model needs for a byte of the held-out text, over evenly spread rows of at most
/// `options.data.eval_bytes` bytes in all. Equal on every rank.
double held_out_bits_per_byte(Execution& execution, const ModelConfig& model, const Corpus& corpus,
                              const Options& options);

}  // namespace llama
