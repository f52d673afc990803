#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace fsdp {

/// Decides what becomes of the tensors that autograd saves for backward.
class SavePacker {
 public:
  /// For one tensor: autograd hands it over at once (`call_pack_hook`) and asks for it in backward.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() = 0;

 protected:
  ~SavePacker() = default;
};

/// While it lives, every tensor that autograd saves on this thread goes to `packer`, and none to
/// the one before.
///
/// LibTorch asks its autograd engine for such hooks, and a program may say which engine that is. So
/// the first use puts one in front that answers this question and passes everything else on to the
/// one that is there: LibTorch's own, or Python's where Python is in the process.
class PackSavedTensors {
 public:
  explicit PackSavedTensors(SavePacker& packer);
  ~PackSavedTensors();
  PackSavedTensors(const PackSavedTensors&) = delete;
  PackSavedTensors& operator=(const PackSavedTensors&) = delete;

 private:
  SavePacker* outer_;
};

}  // namespace fsdp
