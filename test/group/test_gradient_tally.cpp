// Which parameters of a group have their gradients: beside a set of the ones noted.
#include <ATen/ATen.h>

#include <catch2/catch.hpp>
#include <random>
#include <set>
#include <utility>

#include "group/reduce/gradient_tally.hpp"

namespace fsdp::test {

TEST_CASE("gradients are complete when all that are expected have come", "[group][gradient_tally]") {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 draw(seed);
    const size_t params = 1 + draw() % 5;
    const size_t trainable = 1 + draw() % params;
    GradientTally tally(params);
    std::set<size_t> now, last;
    for (int event = 0; event < 100; ++event) {
      CAPTURE(event);
      switch (draw() % 8) {
        case 0:
          tally.end_backward();
          if (!now.empty()) last = std::exchange(now, {});
          break;
        case 1:
          tally.reset();
          now.clear();
          last.clear();
          break;
        default: {
          const size_t index = draw() % trainable;
          tally.note(index);  // again, where a parameter is used twice
          now.insert(index);
        }
      }
      CHECK(tally.is_complete(trainable) == (now.size() == trainable || (!last.empty() && now == last)));
    }
  }
}

TEST_CASE("what waits for a later backward outlives this one", "[group][gradient_tally]") {
  GradientTally tally(2);
  tally.partial_sum(1) = at::ones({2});
  tally.accumulated(0) = at::full({3}, 2.0);
  tally.is_reduced = true;
  tally.end_backward();
  CHECK_FALSE(tally.is_reduced);
  tally.reset();
  CHECK_FALSE(tally.partial_sum(0).defined());
  CHECK(at::equal(tally.partial_sum(1), at::ones({2})));
  CHECK(at::equal(tally.accumulated(0), at::full({3}, 2.0)));
}

}  // namespace fsdp::test
