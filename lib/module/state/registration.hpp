#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>

namespace fsdp {

/// One entry of a module's parameter table that a group's parameter took over.
struct Registration {
  torch::nn::Module* module;
  std::weak_ptr<torch::nn::Module> alive;
  bool is_shared;  ///< false: no shared_ptr owns the module (it is on the stack, say)
  std::string key;
  size_t slot;   ///< position in the table
  size_t param;  ///< index in the group
};

/// The entry at `slot`; its `param` is to be set.
Registration registration_at(torch::nn::Module& module, size_t slot);

/// The module is gone, and the entry with it.
inline bool is_gone(const Registration& entry) { return entry.is_shared && entry.alive.expired(); }

/// What the table holds there now; null if it has fewer entries. Only for an entry that is not gone.
const at::Tensor* tensor_at(const Registration& entry);

}  // namespace fsdp
