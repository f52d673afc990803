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

/// A parameter of the original, where the copy has it.
struct CopiedParam {
  at::Tensor original;
  std::optional<FoundParam> param;  ///< where it is sharded
  struct Place {
    std::shared_ptr<torch::nn::Module> module;  ///< of the copy
    size_t slot;
    std::string name;
    at::Tensor& entry() const;
  };
  std::vector<Place> places = {};
};

struct CopyPairs {
  std::vector<CopiedParam> params = {};
  std::unordered_map<const torch::nn::Module*, std::shared_ptr<torch::nn::Module>> modules = {};
  std::unordered_map<const c10::TensorImpl*, at::Tensor> buffers = {};
};

/// Throws UsageError where the copy has another structure.
CopyPairs pair_with_copy(const torch::nn::Module& original, const std::shared_ptr<torch::nn::Module>& copy);

}  // namespace fsdp
