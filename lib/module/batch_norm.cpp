#include <torch/nn/modules/batchnorm.h>

#include "fsdp/policy.hpp"

namespace fsdp {

bool is_batch_norm(const torch::nn::Module& module) {
  using namespace torch::nn;
  return dynamic_cast<const BatchNorm1dImpl*>(&module) != nullptr ||
         dynamic_cast<const BatchNorm2dImpl*>(&module) != nullptr ||
         dynamic_cast<const BatchNorm3dImpl*>(&module) != nullptr;
}

}  // namespace fsdp
