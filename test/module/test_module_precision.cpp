#include <catch2/catch.hpp>
#include <torch/nn/modules/linear.h>

#include "module/state/module_precision.hpp"

namespace fsdp::test {
namespace {

Unit segment_of(torch::nn::Module& module) { return {&module, "", module.weak_from_this()}; }

/// Two modules that share a state, and their buffers.
struct ModulesWithBuffers {
  explicit ModulesWithBuffers(const MixedPrecisionPolicy& policy)
      : precision(policy, {segment_of(*first), segment_of(*second)}) {
    precision.move_buffers({sums, counts}, at::kCPU);
  }
  torch::nn::Linear first{2, 2}, second{2, 2};
  at::Tensor sums = at::ones({3}), counts = at::ones({3}, at::kLong);
  ModulePrecision precision;
};

}  // namespace

TEST_CASE("floating-point buffers get the policy's dtype, and what they are saved in is noted",
          "[module][module_precision]") {
  ModulesWithBuffers modules({.buffer_dtype = at::kBFloat16});
  CHECK(modules.sums.scalar_type() == at::kBFloat16);
  CHECK(modules.counts.scalar_type() == at::kLong);
  REQUIRE(modules.precision.cast_buffers().size() == 1);
  CHECK(modules.precision.cast_buffers()[0].dtype == at::kFloat);
  modules.precision.set_own_dtype(at::kDouble);
  CHECK(modules.precision.cast_buffers()[0].dtype == at::kDouble);
  CHECK(modules.sums.scalar_type() == at::kBFloat16);
}

TEST_CASE("buffers on meta stay there, in the policy's dtype", "[module][module_precision]") {
  ModulePrecision precision({.buffer_dtype = at::kHalf}, {});
  const auto buffer = at::empty({3}, at::TensorOptions().device(at::kMeta));
  precision.move_buffers({buffer}, at::kCPU);
  CHECK(buffer.is_meta());
  CHECK(buffer.scalar_type() == at::kHalf);
}

TEST_CASE("without full_precision_in_eval the modules' modes ask for nothing", "[module][module_precision]") {
  ModulesWithBuffers modules({.buffer_dtype = at::kBFloat16});
  modules.first->eval();
  modules.second->eval();
  CHECK(!modules.precision.follows_modes());
  CHECK(!modules.precision.wants_own_dtype());
  modules.precision.follow_modes({});
  CHECK(modules.sums.scalar_type() == at::kBFloat16);
}

TEST_CASE("with full_precision_in_eval buffers have their own dtype while all modules of the state are in eval mode",
          "[module][module_precision]") {
  ModulesWithBuffers modules({.buffer_dtype = at::kBFloat16, .full_precision_in_eval = true});
  modules.first->eval();
  CHECK(!modules.precision.wants_own_dtype());
  modules.second->eval();
  CHECK(modules.precision.wants_own_dtype());
  CHECK(!modules.precision.computes_in_own_dtype());  // not before it is told to follow

  modules.precision.follow_modes({});
  CHECK(modules.precision.computes_in_own_dtype());
  CHECK(modules.sums.scalar_type() == at::kFloat);

  modules.first->train();
  modules.precision.follow_modes({});
  CHECK(!modules.precision.computes_in_own_dtype());
  CHECK(modules.sums.scalar_type() == at::kBFloat16);
}

TEST_CASE("modules that are gone leave the dtypes as they are", "[module][module_precision]") {
  auto module = torch::nn::Linear(2, 2);
  ModulePrecision precision({.full_precision_in_eval = true}, {segment_of(*module)});
  module->eval();
  precision.follow_modes({});
  module = torch::nn::Linear(2, 2);  // in training mode
  CHECK(precision.wants_own_dtype());
}

}  // namespace fsdp::test
