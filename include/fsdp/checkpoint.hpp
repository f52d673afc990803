#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <string>

#include "fsdp/checkpoint_parts.hpp"

// Saving and resuming training. The folder is a plain, whole checkpoint: Hugging Face's tools open it, and it is read
// at any other world size, mesh, placement or layout.
//
//   fsdp::save_checkpoint("run/step-100", {model, optimizer, R"({"epoch": 2})"}, {.keep_last = 3});
//   if (auto path = fsdp::latest_checkpoint("run")) fsdp::load_checkpoint(*path, {model, optimizer});
namespace fsdp {

/// A module by reference, from whatever holds it.
class CheckpointModule {
 public:
  CheckpointModule(torch::nn::Module& module) : module_(&module) {}  // NOLINT: implicit, for {model, optimizer}
  template <class Impl>
  CheckpointModule(const torch::nn::ModuleHolder<Impl>& holder) : module_(holder.ptr().get()) {}  // NOLINT
  template <class Impl>
  CheckpointModule(const std::shared_ptr<Impl>& module) : module_(module.get()) {}  // NOLINT
  torch::nn::Module& get() const { return *module_; }

 private:
  torch::nn::Module* module_;
};

/// An optimizer by reference, or none.
class CheckpointOptimizer {
 public:
  CheckpointOptimizer() = default;
  CheckpointOptimizer(torch::optim::Optimizer& optimizer) : optimizer_(&optimizer) {}  // NOLINT: implicit
  torch::optim::Optimizer* get() const { return optimizer_; }

 private:
  torch::optim::Optimizer* optimizer_ = nullptr;
};

struct Checkpoint {
  /// Sharded or plain.
  CheckpointModule model;
  /// LibTorch's AdamW, Adam, SGD, Adagrad or RMSprop.
  CheckpointOptimizer optimizer = {};
  /// The caller's own, as JSON: saved from rank 0.
  std::string extra = {};
  /// The default generators' state, of each rank its own.
  bool rng_state = true;
};

/// Saves parameters, buffers, the optimizer's state, options and step counters by parameter name, random generators and
/// `extra`. A collective call over options.world; see save_checkpoint_parts for what is promised and thrown.
///
/// The folder has model.safetensors (or several), optimizer.safetensors with "PARAMETER.exp_avg" and so on,
/// optimizer.json, rng.safetensors and extra.json. A tied parameter is saved once, with its other names in the file's
/// metadata. Values come in the parameters' original dtype, buffers in the one before a policy cast them.
/// Throws UsageError for a module on the meta device or another optimizer, StateError while full parameters are shown.
void save_checkpoint(const std::string& path, const Checkpoint& checkpoint, const SaveCheckpointOptions& options = {});

struct LoadedCheckpoint {
  /// Of all that was asked for, where `strict` is off.
  CheckpointMisfits misfits;
  std::string extra;               ///< "" if there was none
  int world_size = 0;              ///< of the ranks that saved it; 0: not known
  bool restored_rng_state = false;  ///< it returns at an equal world size alone
};

/// Loads what `checkpoint` names from a checkpoint of any world size, or the model alone from any .safetensors file or
/// folder with an index. `checkpoint.extra` is not looked at. Every rank reads its own elements.
///
/// Names, sizes and dtypes of everything are compared first: what does not fit is thrown as one UsageError, with nothing
/// changed, unless `strict` is off. Afterwards a read error or damaged block is a CheckpointError on all ranks that leaves
/// tensors partly loaded, see VerifyChecksums; the optimizer is as it was then, but for state tensors that it had
/// already. A parameter without state in the checkpoint has none afterwards. The optimizer is built before, over
/// the sharded parameters.
LoadedCheckpoint load_checkpoint(const std::string& path, const Checkpoint& checkpoint,
                                 const LoadCheckpointOptions& options = {});

}  // namespace fsdp
