#include <catch2/catch.hpp>

#include "dtensor/rules/operator_family.hpp"

namespace fsdp::test {
namespace {

const OperatorForm& form(const char* name, const char* overload = "") {
  return form_of(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload));
}

struct Example {
  Family family;
  const char *name, *overload;
  bool is_in_every_torch = true;
};

// At least one of each family; those at its borders beside it.
const std::vector<Example> kExamples = {
    {Family::kPointwise, "aten::add", "Tensor"},
    {Family::kPointwise, "aten::copy_", ""},
    {Family::kPointwise, "aten::_foreach_add_", "List"},
    {Family::kPointwise, "aten::_fused_adamw_", ""},
    {Family::kPointwise, "aten::add", "out"},
    {Family::kGeneral, "aten::_foreach_mm", "", /*is_in_every_torch=*/false},
    {Family::kGeneral, "aten::all", "dimname", /*is_in_every_torch=*/false},
    {Family::kGeneral, "aten::sum", "dim_DimnameList", /*is_in_every_torch=*/false},
    {Family::kGeneral, "aten::equal", ""},
    {Family::kGeneral, "aten::mm", ""},
    {Family::kGeneral, "aten::contiguous", ""},
    {Family::kGeneral, "aten::_conj", ""},
    {Family::kGeneral, "aten::linalg_matrix_rank", "atol_rtol_tensor_out"},
    {Family::kComposite, "aten::reshape", ""},
    {Family::kComposite, "aten::positive", ""},
    {Family::kComposite, "aten::batch_norm", ""},
    {Family::kAlongDim, "aten::softmax", "int"},
    {Family::kAlongDim, "aten::sort", ""},
    {Family::kReduce, "aten::sum", "dim_IntList"},
    {Family::kReduce, "aten::linalg_vector_norm", ""},
    {Family::kDot, "aten::dot", ""},
    {Family::kForeachNorm, "aten::_foreach_norm", "Scalar"},
    {Family::kLike, "aten::zeros_like", ""},
    {Family::kDrawLike, "aten::rand_like", ""},
    {Family::kDraw, "aten::normal_", ""},
    {Family::kNew, "aten::new_zeros", ""},
    {Family::kAlias, "aten::detach", ""},
    {Family::kView, "aten::select", "int"},
    {Family::kView, "aten::_reshape_alias", ""},
    {Family::kMayTakeData, "aten::_has_compatible_shallow_copy_type", ""},
    {Family::kKept, "aten::detach_", ""},
    {Family::kSetData, "aten::set_", "source_Tensor"},
    {Family::kRefused, "aten::resize_", ""},
    {Family::kRefused, "aten::t_", ""},
};

}  // namespace

TEST_CASE("each family has the operators that its rule is right for", "[dtensor][operator_family]") {
  for (const auto& example : kExamples) {
    INFO(example.name << " " << example.overload);
    if (!example.is_in_every_torch && !c10::Dispatcher::singleton().findSchema({example.name, example.overload})) continue;
    CHECK(static_cast<int>(form(example.name, example.overload).family) == static_cast<int>(example.family));
  }
}

TEST_CASE("every family has an example", "[dtensor][operator_family]") {
  for (int family = 0; family <= static_cast<int>(Family::kRefused); ++family) {
    INFO(family);
    CHECK(std::any_of(kExamples.begin(), kExamples.end(), [&](const Example& one) { return static_cast<int>(one.family) == family; }));
  }
}

TEST_CASE("a form says what is written, also where the schema does not", "[dtensor][operator_family]") {
  CHECK(form("aten::add_", "Tensor").writes == 1);
  CHECK(form("aten::add", "Tensor").writes == 0);
  CHECK(form("aten::add", "out").writes == 1U << 3);
  CHECK(form("aten::native_batch_norm").writes == (1U << 3 | 1U << 4));  // running_mean and running_var
}

TEST_CASE("a form knows its arguments by name", "[dtensor][operator_family]") {
  const auto& sum = form("aten::sum", "dim_IntList");
  CHECK(sum.dim == 1);
  CHECK(sum.keepdim == 2);
  CHECK(sum.dtype == 3);
  CHECK(sum.memory_format == -1);
  CHECK(form("aten::clone").memory_format == 1);
}

TEST_CASE("what autograd does not follow is not differentiable", "[dtensor][operator_family]") {
  CHECK(form("aten::add", "Tensor").is_differentiable);
  CHECK_FALSE(form("aten::detach").is_differentiable);
  CHECK_FALSE(form("aten::zeros_like").is_differentiable);
  CHECK_FALSE(form("aten::equal").is_differentiable);
}

}  // namespace fsdp::test
