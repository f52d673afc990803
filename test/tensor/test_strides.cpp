#include <catch2/catch.hpp>

#include <ATen/ATen.h>

#include "dense_tensor.hpp"
#include "support/draw.hpp"
#include "tensor/strides.hpp"

namespace fsdp::test {
namespace {

/// With any stride where there is one row.
std::vector<int64_t> draw_idle_strides(Draw& draw, const at::Tensor& tensor) {
  auto strides = tensor.strides().vec();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.size(dim) == 1) strides[static_cast<size_t>(dim)] = draw.between(0, 9);
  return strides;
}

}  // namespace

TEST_CASE("elements lie in the order asked for, copied only where they have to move", "[tensor][strides]") {
  const auto seed = draw_seed();
  INFO("FSDP_TEST_SEED=" << seed);
  Draw draw(seed);
  for (int trial = 0; trial < 300; ++trial) {
    const auto target = draw_dense(draw);
    const auto strides = draw_idle_strides(draw, target);
    const auto alike = target.as_strided(target.sizes(), draw_idle_strides(draw, target));
    CHECK(lay_out_alike(target.sizes(), alike.strides(), strides));
    CHECK(in_memory_order(alike, strides).is_alias_of(alike));
    const auto other = target.contiguous();
    const bool is_in_order = other.numel() < 2 || other.squeeze().strides() == target.squeeze().strides();
    if (other.numel() > 0) CHECK(lay_out_alike(target.sizes(), other.strides(), strides) == is_in_order);
    for (const auto& each : {alike, other}) {
      const auto ordered = in_memory_order(each, strides);
      CHECK(ordered.equal(target.as_strided({target.numel()}, {1})));
    }
  }
}

}  // namespace fsdp::test
