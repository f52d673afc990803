#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace llama {

struct DataOptions {
  std::string path;
  std::vector<std::string> suffixes;
  int64_t eval_bytes = 131072;
};

struct ModelOptions {
  int64_t layers = 4;
  int64_t dim = 128;
  int64_t heads = 4;
  int64_t context = 256;
  bool tied_output = false;
};

struct TrainingOptions {
  int64_t steps = 600;
  int64_t global_batch = 16;
  double learning_rate = 4e-3;
  int64_t warmup = 50;
  double weight_decay = 0.1;
  double clip = 1.0;
  uint64_t seed = 1;
};

struct RankOptions {
  int ranks = 0;  ///< 0: one per GPU, or two on the CPU
  std::string device = "auto";
  bool no_shard = false;
  std::string reshard_after_forward = "auto";  ///< "auto", "true", "false" or a number of ranks
  double timeout_s = 600;
};

struct CheckpointOptions {
  std::string save;        ///< the folder that gets checkpoints; empty: none are saved
  int64_t save_every = 0;  ///< 0: only after the last step
  int keep = 0;            ///< 0: all
  std::string resume;      ///< a checkpoint, or a folder that has some; empty: the run begins anew
};

struct OutputOptions {
  std::string json;      ///< empty: no record
  std::string timeline;  ///< empty: none is recorded
  bool report = false;   ///< print fsdp::report at the end
  int64_t sample_bytes = 200;
  double temperature = 0.8;
};

struct Options {
  DataOptions data;
  ModelOptions model;
  TrainingOptions training;
  RankOptions ranks;
  CheckpointOptions checkpoints;
  OutputOptions output;
  bool check = false;  ///< look at options and data, print the number of ranks, and end
};

/// Reads the command line. Returns the exit code if there is nothing left to do: 0 after --help,
/// 2 after a wrong option, which it reports in one line on standard error.
std::optional<int> parse_options(int argc, char** argv, Options& options);

/// What is wrong with options that are each right alone, in one line; empty if nothing is.
/// `ranks` is the number of processes that will run.
std::string find_contradiction(const Options& options, int ranks);

}  // namespace llama
