#include <ATen/ATen.h>

#include <catch2/catch.hpp>

#include "group/reduce/gradient_division.hpp"
#include "support/draw.hpp"

// What gradients are divided by. processes/test_fsdp2_mixed_precision.py compares with FSDP2's rule.
namespace fsdp {

TEST_CASE("float16 is divided before and after its sum, by about the square root", "[group][gradient_division]") {
  struct Known {
    double factor, before, after;
  };
  for (const auto& [factor, before, after] :
       {Known{1, 1, 1}, {2, 2, 1}, {3, 2, 1.5}, {4, 2, 2}, {6, 4, 1.5}, {8, 4, 2}, {12, 4, 3}, {16, 4, 4}, {64, 8, 8}}) {
    CAPTURE(factor);
    const auto division = gradient_division(factor, at::kHalf);
    CHECK(division.before == before);
    CHECK(division.after == after);
  }
  for (int ranks = 1; ranks <= 64; ++ranks) {
    CAPTURE(ranks);
    const auto [before, after] = gradient_division(ranks, at::kHalf);
    CHECK(before * after == ranks);
    CHECK(before * before < 4.0 * ranks);
    // It stopped where it had to: at a factor that does not divide the ranks, or at the root.
    CHECK((ranks % static_cast<int>(before) != 0 || before * before >= ranks));
  }
}

TEST_CASE("other dtypes are divided once, after the sum", "[group][gradient_division]") {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble})
    for (int ranks = 1; ranks <= 64; ++ranks) {
      const auto [before, after] = gradient_division(ranks, dtype);
      CHECK(before == 1);
      CHECK(after == ranks);
    }
}

TEST_CASE("a divisor divides as a number does, to the last bit", "[group][gradient_division]") {
  Divisor divisor;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    test::Draw draw(seed);
    const auto dtype = draw.one_of<at::ScalarType>({at::kFloat, at::kDouble, at::kBFloat16, at::kHalf});
    const double factor = draw.one_of<double>({1, 3, 8, 257, 1000, 0.7});
    CAPTURE(seed, factor, dtype);
    auto values = at::randn({draw.between(0, 40)}).to(dtype);
    const auto expected = values.clone().div_(factor);
    divisor.divide(values, factor);
    CHECK(at::equal(values, expected));
  }
}

}  // namespace fsdp
