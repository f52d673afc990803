#include "module/refuse_container.hpp"

#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>

#include <typeinfo>

#include "base/require.hpp"

namespace fsdp {

bool is_container(const torch::nn::Module& module) {
  const auto& type = typeid(module);
  return type == typeid(torch::nn::ModuleListImpl) || type == typeid(torch::nn::ModuleDictImpl) ||
         type == typeid(torch::nn::ParameterListImpl) || type == typeid(torch::nn::ParameterDictImpl);
}

void refuse_container(const torch::nn::Module& module) {
  require(!is_container(module),
          "fully_shard: {} is a container without a forward of its own; call fully_shard on its "
          "elements, on the list of them, or on the module around it",
          module.name());
}

}  // namespace fsdp
