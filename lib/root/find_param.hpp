#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "root/group_port.hpp"

namespace fsdp {

/// A tensor recognised as one of a parameter's: the unsharded tensor, the DTensor, or this rank's rows.
struct FoundParam {
  std::shared_ptr<ParamGroup> group;
  size_t index;
  bool is_unsharded_param;
  FSDPParam& param() const { return group->params()[index]; }
};

/// nullopt for any other tensor, views of parameters among them.
std::optional<FoundParam> find_param(const at::Tensor& tensor);

}  // namespace fsdp
