#pragma once

#include <memory>
#include <string>

#include "model.hpp"
#include "options.hpp"

namespace llama {

/// Of one rank: what it holds between steps, and the most it held at once.
struct HeldBytes {
  int64_t sharded = 0;
  int64_t peak_unsharded = 0;
};

/// How the model runs: alone in this process, or sharded over ranks. The training loop is the same.
class Execution {
 public:
  virtual ~Execution() = default;

  virtual int rank() const = 0;
  virtual int ranks() const = 0;
  virtual torch::Device device() const = 0;
  /// Every rank gives a value and gets the mean of all.
  virtual double mean_over_ranks(double value, const std::string& subject) = 0;
  /// Every rank gets what rank 0 gives.
  virtual int64_t from_rank0(int64_t value) = 0;
  /// Scales the gradients down so that their global norm is at most `max_norm`.
  virtual void clip_gradients(double max_norm) = 0;
  /// A forward without autograd, by all ranks together.
  virtual torch::Tensor predict(const torch::Tensor& tokens) = 0;
  virtual HeldBytes held_bytes() const = 0;

  // What only a sharded run can show.
  /// Before each step of the training, all ranks. step: from 0 on in every run, also in a resumed
  /// one.
  virtual void begin_step(int64_t) {}
  /// Writes what `begin_step` has had recorded of all ranks to the file that --timeline names.
  virtual void write_timeline() {}
  virtual std::string report() const { return {}; }
};

/// The model as it is, in this process. Makes no call of libfsdp.
std::unique_ptr<Execution> run_plain(LanguageModel model, const RankOptions& options);

/// The model sharded over the ranks that the launcher started.
std::unique_ptr<Execution> run_sharded(LanguageModel model, const Options& options);

}  // namespace llama
