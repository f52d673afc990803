#pragma once

#include "sample.hpp"
#include "trainer.hpp"

namespace llama {

/// Everything a run leaves behind.
struct RunRecord {
  int ranks = 0;
  int64_t parameters = 0;  ///< of the whole model
  int64_t resumed_at_step = 0;  ///< 0: it was not resumed
  TrainingResult training;
  double val_bits_per_byte = 0;
  HeldBytes bytes;  ///< of rank 0
  Sample sample;
};

/// Writes one JSON object, aside and then renamed, so that a record is whole or absent.
/// Throws std::runtime_error naming the path if it cannot be written.
void write_record(const std::string& path, const RunRecord& record, const Options& options);

}  // namespace llama
