#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "fsdp/dtensor.hpp"
#include "group/param_group.hpp"

namespace fsdp {

/// A tensor recognised as a parameter's handle or registered parameter.
struct FoundParam {
  std::shared_ptr<ParamGroup> group;
  size_t index;
  bool is_handle;
  ShardedParam& param() const { return group->params()[index]; }
};

/// nullopt for any other tensor, views of parameters among them.
std::optional<FoundParam> find_param(const at::Tensor& tensor);

/// The placements of a parameter that is not in a flat layout.
std::vector<Placement> placements_of(const FoundParam& found);

/// `local`, spread over the ranks as the registered parameter is, joined with its mesh.
DTensor as_dtensor(const FoundParam& found, const at::Tensor& local);

/// The same memory as an ordinary tensor, which operators treat as such.
at::Tensor plain_view(const at::Tensor& registered);

}  // namespace fsdp
