#pragma once

#include <memory>
#include <string>
#include <vector>

#include "property/random_tree.hpp"

namespace fsdp::test {

/// A leaf's `grad_dtype`: none until it is set; then one dtype, or whatever autograd makes.
struct GradDtype {
  bool is_set = false;
  std::optional<at::ScalarType> dtype = {};
  bool operator==(const GradDtype&) const = default;
};

/// What a user sets on one parameter, on the sharded one or on the module's own member.
struct DrawnGradDtype {
  By by;
  std::string name;
  at::Tensor member;
  bool is_before;                  ///< the first one is set before fully_shard
  std::vector<GradDtype> by_step;  ///< once set it stays so
};

/// The dtypes of a model's gradients, by what was drawn alone.
class GradDtypes {
 public:
  /// `ignored` parameters are left out.
  GradDtypes(const RandomTree& tree, const torch::nn::Module& body, const std::vector<at::Tensor>& ignored);

  void set_before_sharding() const;
  /// registered: of the sharded body, by name.
  void set_for_step(const NamedTensors& registered) const;
  void begin_step(int step) { step_ = static_cast<size_t>(step); }

  /// Of this step. parameter: as the module's member holds it.
  GradientDtypes of(const at::Tensor& parameter) const;
  /// Rounds the plain model's gradients as those of the sharded one are.
  void round() const;

 private:
  Training training_;
  std::vector<DrawnGradDtype> drawn_;
  std::vector<at::Tensor> widened_;  // whose gradients autograd makes in the dtype of a wider operand
  size_t step_ = 0;
};

}  // namespace fsdp::test
