// Which parameters of a group have their gradients, and what waits for a reduction: beside sets and sums kept by hand.
#include <ATen/ATen.h>

#include <catch2/catch.hpp>
#include <map>
#include <random>
#include <set>
#include <utility>

#include "group/reduce/gradient_store.hpp"
#include "param/fsdp_param.hpp"

namespace fsdp::test {
namespace {

/// Parameters of one rank, each of three elements, and the unsharded parameters that a module would hold.
struct Params {
  explicit Params(size_t count, at::ScalarType dtype = at::kFloat) {
    for (size_t i = 0; i < count; ++i) {
      handles.push_back(at::zeros({3}, dtype));
      list.emplace_back(ParamSpec{.name = "p" + std::to_string(i), .layout = ShardLayout(c10::IntArrayRef{3}, 1), .param_dtype = dtype},
                        handles.back());
    }
  }
  std::vector<at::Tensor> handles;
  std::vector<FSDPParam> list;
};

}  // namespace

TEST_CASE("gradients are complete when all that are expected have come", "[group][gradient_store]") {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 draw(seed);
    const size_t count = 1 + draw() % 5;
    const size_t trainable = 1 + draw() % count;
    Params params(count);
    GradientStore store(params.list, count);
    std::set<size_t> now, last;
    for (int event = 0; event < 100; ++event) {
      CAPTURE(event);
      switch (draw() % 8) {
        case 0:
          store.note_reduced();
          store.end_backward();
          if (!now.empty()) last = std::exchange(now, {});
          break;
        case 1:
          store.reset();
          now.clear();
          last.clear();
          break;
        default: {
          const size_t index = draw() % trainable;
          store.arrived(index);  // again, where a parameter is used twice
          now.insert(index);
        }
      }
      CHECK(store.is_complete(trainable) == (now.size() == trainable || (!last.empty() && now == last)));
      CHECK_FALSE(store.is_reduced());
    }
  }
}

TEST_CASE("what is taken is the sum of all backwards since the last time", "[group][gradient_store]") {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 draw(seed);
    Params params(3);
    GradientStore store(params.list, params.list.size());
    std::map<size_t, double> sums;
    for (int event = 0; event < 60; ++event) {
      const size_t index = draw() % params.handles.size();
      auto& gradient = params.handles[index].mutable_grad();
      const auto value = static_cast<double>(draw() % 16);
      switch (draw() % 4) {
        case 0:  // autograd
          gradient = gradient.defined() ? gradient + value : at::full({3}, value);
          sums[index] += value;
          break;
        case 1:  // a backward without reduction
          if (!gradient.defined()) break;
          store.accumulated(index) = store.take(index).to(at::kDouble);
          CHECK_FALSE(params.handles[index].grad().defined());
          break;
        case 2: {
          const bool is_there = sums.contains(index);
          const auto taken = store.take(index);
          REQUIRE(taken.defined() == is_there);
          if (is_there) CHECK(at::equal(taken.to(at::kDouble), at::full({3}, sums[index], at::kDouble)));
          sums.erase(index);
          break;
        }
        default:
          store.end_backward();  // what waits outlives it
      }
      CHECK(store.has_unreduced(/*counts_partial_sums=*/false) == !sums.empty());
    }
    store.drop();
    CHECK_FALSE(store.has_unreduced(/*counts_partial_sums=*/true));
  }
}

TEST_CASE("partial sums wait for a backward that all-reduces", "[group][gradient_store]") {
  Params params(2);
  GradientStore store(params.list, params.list.size());
  CHECK_FALSE(store.has_partial_sums());
  store.partial_sum(1) = at::ones({2});
  store.reset();
  CHECK(store.has_partial_sums());
  CHECK(at::equal(store.partial_sum(1), at::ones({2})));
  CHECK(store.has_unreduced(/*counts_partial_sums=*/true));
  CHECK_FALSE(store.has_unreduced(/*counts_partial_sums=*/false));
  store.drop();
  CHECK_FALSE(store.has_partial_sums());
}

TEST_CASE("to add to a sum of another dtype takes a copy of the gradient", "[group][gradient_store]") {
  Params params(1, at::kBFloat16);
  GradientStore store(params.list, params.list.size());
  params.handles[0].mutable_grad() = at::ones({3}, at::kBFloat16);
  CHECK(store.bytes_to_take(0) == 0);
  store.accumulated(0) = at::ones({3}, at::kBFloat16);
  CHECK(store.bytes_to_take(0) == 0);
  store.accumulated(0) = at::ones({3}, at::kFloat);
  CHECK(store.bytes_to_take(0) == 12);
  params.handles[0].mutable_grad().reset();
  CHECK(store.bytes_to_take(0) == 0);
}

}  // namespace fsdp::test
