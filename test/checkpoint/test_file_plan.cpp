#include "checkpoint/plan/file_plan.hpp"

#include <catch2/catch.hpp>

#include "checkpoint/format/weight_index.hpp"
#include "fsdp/error.hpp"
#include "support/error_of.hpp"

namespace fsdp::test {
namespace {

using Catch::Contains;

SectionDescription section(std::vector<TensorDescription> tensors) { return {"model", std::move(tensors)}; }

TEST_CASE("files are filled in order up to the limit; a larger tensor has one of its own", "[checkpoint][file_plan]") {
  const auto plan = plan_files({section({{"a", at::kFloat, {10}}, {"b", at::kFloat, {10}}, {"c", at::kFloat, {100}},
                                         {"d", at::kFloat, {1}}})}, 80);
  REQUIRE(plan.files.size() == 3);
  CHECK(plan.files[0].name == "model-00001-of-00003.safetensors");
  CHECK(plan.places[0][1].file == 0);
  CHECK(plan.places[0][2].file == 1);
  CHECK(plan.places[0][3].file == 2);
  CHECK(plan.places[0][1].offset == plan.places[0][0].offset + 40);
  const auto index = parse_weight_index(plan.indexes.at("model.safetensors.index.json"), "i");
  CHECK(index.total_bytes == 484);
  CHECK(index.files.at("c") == "model-00002-of-00003.safetensors");
  CHECK(plan_files({section({{"a", at::kFloat, {10}}})}, 80).files[0].name == "model.safetensors");
}

TEST_CASE("wide elements come first, so that each tensor lies at a multiple of its own", "[checkpoint][file_plan]") {
  const auto plan = plan_files({section({{"bytes", at::kByte, {3}}, {"low", at::kBFloat16, {3}}, {"wide", at::kDouble, {2}},
                                         {"float", at::kFloat, {1}}})}, 1000);
  CHECK(plan.places[0][2].offset % 8 == 0);
  CHECK(plan.places[0][3].offset == plan.places[0][2].offset + 16);
  CHECK(plan.places[0][1].offset == plan.places[0][3].offset + 4);
  CHECK(plan.places[0][0].offset == plan.places[0][1].offset + 6);
}

TEST_CASE("names that cannot be saved are refused", "[checkpoint][file_plan]") {
  const auto error_for = [](std::vector<SectionDescription> sections) {
    return error_of<UsageError>([&] { plan_files(sections, 80); });
  };
  CHECK_THAT(error_for({section({{"a", at::kFloat, {1}}, {"a", at::kFloat, {1}}})}), Contains("'a'") && Contains("two"));
  CHECK_THAT(error_for({section({{"__metadata__", at::kFloat, {1}}})}), Contains("__metadata__"));
  CHECK_THAT(error_for({section({{"\xff", at::kFloat, {1}}})}), Contains("UTF-8"));
  CHECK_THAT(error_for({section({{"a", at::kFloat, {1}, false, {"b"}}, {"b", at::kFloat, {1}}})}), Contains("other name 'b'"));
  CHECK_THAT(error_for({{"../model", {}}}), Contains("'../model'"));
  CHECK_THAT(error_for({section({}), section({})}), Contains("two of this name"));
  CHECK_THAT(error_of<UsageError>([] { plan_files({}, 0); }), Contains("max_file_bytes"));
}

}  // namespace
}  // namespace fsdp::test
