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

/// A parameter of which each of several ranks holds rows or columns: chunks of ceil(n / ranks).
struct Slice {
  at::Tensor tensor;  ///< whole in the plain model
  int64_t dim = 0;
  std::vector<int64_t> sizes = {};  ///< of the whole
  bool is_expert = false;           ///< cut over ranks that see other batches, and each use their own
};

/// A part of a model that is cut over ranks before FSDP sees it. It stays whole in the plain model.
class SlicedPart {
 public:
  virtual ~SlicedPart() = default;
  virtual std::vector<Slice> slices() const = 0;
  /// From now on the tensors of `slices` hold what is of one rank; `group` adds up over all of them.
  virtual void cut(int64_t rank, int64_t ranks, Communicator* group) = 0;
};

/// Begins with a view of its parameter.
inline constexpr auto kViewed = "viewed";

/// Multiplies its parameter with a wider operand; what such parameters are called.
inline constexpr auto kWidened = "widened", kWidenedWeight = "gain_of_wider";
/// The dtype of that operand: what a smaller one is promoted to.
at::ScalarType wider(at::ScalarType dtype);

/// The sliced parts below `module`, each once.
std::vector<std::shared_ptr<SlicedPart>> sliced_parts(const torch::nn::Module& module);

/// The kinds without parts of their own, and those that contain others.
const std::vector<std::string>& leaf_kinds();
const std::vector<std::string>& nesting_kinds();

}  // namespace fsdp::test
