#pragma once

#include <fsdp/fsdp.hpp>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::test {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// A section of whole tensors.
inline CheckpointSection whole_section(const NamedTensors& tensors, std::string name = "model") {
  CheckpointSection section{std::move(name), {}};
  for (const auto& [key, value] : tensors) section.tensors.push_back({.name = key, .local = value, .sizes = value.sizes().vec()});
  return section;
}

}  // namespace fsdp::test
