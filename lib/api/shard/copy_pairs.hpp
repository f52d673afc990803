#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "root/find_param.hpp"

// Which tensor and which module of a copy stands for which of the original.
namespace fsdp {

/// An entry of the copy's tables of parameters.
struct CopiedEntry {
  std::shared_ptr<torch::nn::Module> module;
  size_t slot;
  std::string name;
  at::Tensor& tensor() const;
};

/// A parameter of the original, where the copy has it.
struct CopiedParam {
  at::Tensor original;
  std::optional<FoundParam> param;  ///< where it is sharded
  std::vector<CopiedEntry> entries = {};
};

struct CopyPairs {
  std::vector<CopiedParam> params = {};
  std::unordered_map<const torch::nn::Module*, std::shared_ptr<torch::nn::Module>> modules = {};
  std::unordered_map<const c10::TensorImpl*, at::Tensor> buffers = {};
};

/// Throws UsageError where the copy has another structure.
CopyPairs pair_with_copy(const torch::nn::Module& original, const std::shared_ptr<torch::nn::Module>& copy);

}  // namespace fsdp
