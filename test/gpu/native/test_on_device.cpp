// Where tensors come when tests run on a device, shown with meta in its place.
#include <ATen/CPUGeneratorImpl.h>

#include "native_world.hpp"

namespace fsdp::test {

TEST_CASE("tensors made of sizes come on the tests' device, others where they belong", "[gpu][on_device]") {
  const auto given = torch::zeros({2}, at::TensorOptions().device(at::kCPU));
  auto generator = at::make_generator<at::CPUGeneratorImpl>(1);
  {
    const OnTestDevice meta(at::kMeta);
    CHECK(torch::empty({2}).is_meta());
    CHECK(torch::randn({2, 3}, at::kDouble).is_meta());
    CHECK(torch::nn::Linear(2, 3)->weight.is_meta());
    CHECK(torch::tensor({1.0, 2.0}).is_cpu());
    CHECK(torch::zeros_like(given).is_cpu());
    CHECK(torch::randn({2}, generator).is_cpu());
    CHECK(torch::ones({2}, at::TensorOptions().device(at::kCPU)).is_cpu());
  }
  CHECK(torch::empty({2}).device().type() == test_device());
}

}  // namespace fsdp::test
