#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <string>

#include "fsdp/api.hpp"
#include "fsdp/checkpoint_parts.hpp"

// Saves and resumes training. A checkpoint is a folder of whole tensors in .safetensors files, which Hugging Face's tools open.
// It can be loaded at any world size, on any mesh and in any placement or layout.
//
//   fsdp::save_checkpoint("run/step-100", {model, optimizer, R"({"epoch": 2})"}, {.keep_last = 3});
//   if (auto path = fsdp::latest_checkpoint("run")) fsdp::load_checkpoint(*path, {model, optimizer});
namespace fsdp {

/// A module by reference, from whatever holds it.
class FSDP_API CheckpointModule {
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
class FSDP_API CheckpointOptimizer {
 public:
  CheckpointOptimizer() = default;
  CheckpointOptimizer(torch::optim::Optimizer& optimizer) : optimizer_(&optimizer) {}  // NOLINT: implicit
  torch::optim::Optimizer* get() const { return optimizer_; }

 private:
  torch::optim::Optimizer* optimizer_ = nullptr;
};

struct FSDP_API Checkpoint {
  /// Sharded or plain.
  CheckpointModule model;
  /// LibTorch's AdamW, Adam, SGD, Adagrad or RMSprop.
  CheckpointOptimizer optimizer = {};
  /// JSON of the program's own; rank 0's is saved.
  std::string extra = {};
  /// Whether to save or load the state of each rank's default random generators.
  bool rng_state = true;
};

/// Saves parameters, buffers, the optimizer's state, options and step counters by parameter name, the random generators' state
/// and `extra`. A collective call over options.world. save_checkpoint_parts says what is kept after a crash, and what is
/// thrown.
///
/// The folder has model.safetensors (or several), optimizer.safetensors with "PARAMETER.exp_avg" and so on,
/// optimizer.json, rng.safetensors and extra.json. A tied parameter is saved once, with its other names in the file's
/// metadata. Values come in the parameters' original dtype, buffers in the one before a policy cast them.
/// Throws UsageError for a module on the meta device or another optimizer, StateError while full parameters are shown.
FSDP_API void save_checkpoint(const std::string& path, const Checkpoint& checkpoint, const SaveCheckpointOptions& options = {});

struct FSDP_API LoadedCheckpoint {
  /// What did not fit; with `strict` there is nothing in it.
  IncompatibleKeys misfits;
  std::string extra;               ///< "" if there was none
  int world_size = 0;              ///< number of ranks that saved it; 0: unknown
  bool restored_rng_state = false;  ///< random generators are restored only at the same world size
};

/// Loads what `checkpoint` names from a checkpoint of any world size, or the model alone from any .safetensors file or
/// folder with an index. `checkpoint.extra` is not looked at. Every rank reads its own elements.
///
/// Names, sizes and dtypes are compared first. With `strict`, one UsageError lists all that do not fit, and nothing is
/// changed. A read error or a damaged block throws CheckpointError on all ranks. Tensors may be partly loaded then (see
/// VerifyChecksums), state tensors that the optimizer had already among them; nothing else of the optimizer has changed.
///
/// The optimizer has to be built before, over the sharded parameters. A parameter without state in the checkpoint has none
/// afterwards.
FSDP_API LoadedCheckpoint load_checkpoint(const std::string& path, const Checkpoint& checkpoint,
                                          const LoadCheckpointOptions& options = {});

}  // namespace fsdp
