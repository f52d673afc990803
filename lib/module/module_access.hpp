#pragma once

#include <torch/nn/module.h>

namespace fsdp {

/// torch::nn::Module keeps its parameter table protected and offers no way to replace an entry. A
/// derived class may name it.
class ModuleAccess : public torch::nn::Module {
 public:
  using Table = torch::OrderedDict<std::string, at::Tensor>;
  static Table& parameters(torch::nn::Module& module) { return module.*&ModuleAccess::parameters_; }
  static const Table& parameters(const torch::nn::Module& module) {
    return module.*&ModuleAccess::parameters_;
  }
};

}  // namespace fsdp
