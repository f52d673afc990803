#include <catch2/catch.hpp>
#include <torch/nn/modules/linear.h>

#include "module/state/tree_position.hpp"

namespace fsdp::test {
namespace {

/// A place that two modules share.
struct SharedPlace {
  torch::nn::Linear first{2, 2}, second{2, 2};
  TreePosition place{std::vector<Unit>{{first.get(), ""}, {second.get(), ""}}};
};

}  // namespace

TEST_CASE("a module without one around it is the root, and messages call it so", "[module][tree_position]") {
  TreePosition place = SharedPlace().place;
  CHECK(place.is_root());
  CHECK(place.name().empty());
  CHECK(place.description() == "root");
  place.set_name_below("");
  CHECK(place.description() == "root");
  CHECK(place.full_name({"weight", 0}, "") == "weight");
}

TEST_CASE("modules that share a state are named after the first; a parameter has the path of its own module",
          "[module][tree_position]") {
  SharedPlace shared;
  shared.place.set_path(*shared.first, "blocks.0");
  shared.place.set_path(*shared.second, "blocks.1");
  shared.place.set_name_below("encoder");
  CHECK(shared.place.name() == "encoder.blocks.0");
  CHECK(shared.place.description() == "encoder.blocks.0");
  CHECK(shared.place.full_name({"weight", 0}, "encoder") == "encoder.blocks.0.weight");
  CHECK(shared.place.full_name({"bias", 1}, "encoder") == "encoder.blocks.1.bias");
}

TEST_CASE("a path is that of the module it is set for, of no other", "[module][tree_position]") {
  SharedPlace shared;
  const torch::nn::Linear other(2, 2);
  shared.place.set_path(*other, "elsewhere");
  shared.place.set_path(*shared.second, "tail");
  CHECK(shared.place.units()[0].path.empty());
  CHECK(shared.place.units()[1].path == "tail");
}

}  // namespace fsdp::test
