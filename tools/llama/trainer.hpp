#pragma once

#include <string>
#include <vector>

#include "data.hpp"
#include "execution.hpp"
#include "progress.hpp"

namespace llama {

struct TrainingResult {
  std::vector<double> losses;    ///< one a step: the mean over all ranks, in nats a byte
  double tokens_per_second = 0;  ///< of all ranks together
};

/// Trains for `options.steps` steps; every rank calls it with the same arguments.
/// Throws std::runtime_error if the loss is no longer finite.
TrainingResult train(LanguageModel& model, Execution& execution, const Corpus& corpus,
                     const TrainingOptions& options, Progress& progress);

/// Bits that the model needs for a byte of the held-out text, over evenly spread rows of at most
/// `options.data.eval_bytes` bytes in all. Equal on every rank.
double held_out_bits_per_byte(Execution& execution, const ModelConfig& model, const Corpus& corpus,
                              const Options& options);

}  // namespace llama
