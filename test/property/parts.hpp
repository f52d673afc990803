#pragma once

#include <memory>

#include "property/random_tree.hpp"

namespace fsdp::test {

/// What every part of a random model is: not called through `forward`, on purpose.
struct Node : torch::nn::Module {
  virtual at::Tensor run(at::Tensor x, Inputs& in) = 0;
  /// Its children hold one tensor together, so that none of them may be a group of its own.
  virtual bool is_one_group() const { return false; }
};

/// From now on the parts of kind "checkpoint" below `module` are checkpoints; before they just run.
void use_checkpoints(torch::nn::Module& module);

std::shared_ptr<Node> build_part(const Part& part);

/// The kinds without parts of their own, and those that contain others.
const std::vector<std::string>& leaf_kinds();
const std::vector<std::string>& nesting_kinds();

}  // namespace fsdp::test
