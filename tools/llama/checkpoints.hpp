#pragma once

#include <fsdp/checkpoint_saver.hpp>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "data.hpp"
#include "model.hpp"
#include "options.hpp"

namespace llama {

/// What --save or --resume name cannot be used by this run; the message is one line for the user.
class CheckpointsError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Where a run begins: at its first step, or where another one saved it.
struct StartingPoint {
  std::string checkpoint;      ///< its folder; empty: the run begins anew
  int64_t step = 0;            ///< steps that are done
  std::vector<double> losses;  ///< of these steps
  int ranks = 0;               ///< that saved it
};

/// Looks at what --resume and --save name; no communication, and nothing is written. A row of the
/// data depends on the seed, its step and its place in the batch alone, so with these, and the
/// text, kept the step is the position in the data. Throws CheckpointsError if there is no
/// checkpoint of tools/train, if another model, text, seed or global batch belongs to it, if it
/// leaves no step to do, or if the folder of --save has a later one.
StartingPoint find_start(const Options& options, const Corpus& corpus);

/// Saves a run as it goes and brings it back: parameters, optimizer, random generators, the step
/// and the losses. All ranks make one, after the process group, and call it alike. With --no-shard
/// it is this process alone.
class Checkpoints {
 public:
  Checkpoints(const Options& options, const Corpus& corpus, StartingPoint start);

  const StartingPoint& start() const { return start_; }
  /// Loads the starting point, if there is one. The options of `optimizer` stay as they are.
  void resume(LanguageModel& model, torch::optim::AdamW& optimizer) const;
  /// After `losses.size()` steps: starts to save if --save-every says so, or after the last one.
  /// Throws fsdp::CheckpointError if that fails, or the last save did.
  void save_if_due(LanguageModel& model, torch::optim::AdamW& optimizer,
                   const std::vector<double>& losses);
  /// Returns when what was started is on the disk; throws as `save_if_due`.
  void finish();

 private:
  CheckpointOptions options_;
  int64_t steps_;
  StartingPoint start_;
  std::string kept_options_;                      ///< as JSON
  std::unique_ptr<fsdp::CheckpointSaver> saver_;  ///< null: nothing is saved
};

}  // namespace llama
