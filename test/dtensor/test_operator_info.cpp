#include <catch2/catch.hpp>

#include "dtensor/operator_info.hpp"

namespace fsdp::test {
namespace {

const OperatorInfo& info(const char* name, const char* overload = "") {
  return info_of(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload));
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

TEST_CASE("each family has the operators that its rule is right for", "[dtensor][operator_info]") {
  for (const auto& example : kExamples) {
    INFO(example.name << " " << example.overload);
    if (!example.is_in_every_torch && !c10::Dispatcher::singleton().findSchema({example.name, example.overload})) continue;
    CHECK(static_cast<int>(info(example.name, example.overload).family) == static_cast<int>(example.family));
  }
}

TEST_CASE("every family has an example", "[dtensor][operator_info]") {
  for (int family = 0; family <= static_cast<int>(Family::kRefused); ++family) {
    INFO(family);
    CHECK(std::any_of(kExamples.begin(), kExamples.end(), [&](const Example& one) { return static_cast<int>(one.family) == family; }));
  }
}

TEST_CASE("what is written is said twice: as the schema has it, and with what that leaves out", "[dtensor][operator_info]") {
  CHECK(info("aten::add_", "Tensor").writes == 1);
  CHECK(info("aten::add_", "Tensor").declared_writes == 1);
  CHECK(info("aten::add", "Tensor").writes == 0);
  CHECK(info("aten::add", "out").writes == 1U << 3);
  CHECK(info("aten::record_stream").declared_writes == 0);
  const auto& batch_norm = info("aten::native_batch_norm");
  CHECK(batch_norm.declared_writes == 0);
  CHECK(batch_norm.writes == (1U << 3 | 1U << 4));  // running_mean and running_var
  CHECK(batch_norm.statistics == batch_norm.writes);
  CHECK(batch_norm.is_written(4));
  CHECK_FALSE(batch_norm.declares_write_of(4));
}

TEST_CASE("arguments are known by their names", "[dtensor][operator_info]") {
  const auto& sum = info("aten::sum", "dim_IntList").arguments;
  CHECK(sum.dim == 1);
  CHECK(sum.keepdim == 2);
  CHECK(sum.dtype == 3);
  CHECK(sum.memory_format == -1);
  CHECK(info("aten::clone").arguments.memory_format == 1);
}

TEST_CASE("what autograd does not follow is no reason for the whole, nor to stand for the unsharded parameter",
          "[dtensor][operator_info]") {
  struct Row {
    const char *name, *overload;
    bool stands_for_unsharded, records_whole;
  };
  for (const auto& row : {Row{"aten::add", "Tensor", true, true}, Row{"aten::clone", "", true, true},
                          Row{"aten::sign", "", false, true}, Row{"aten::eq", "Scalar", false, false},
                          Row{"aten::isfinite", "", false, true}, Row{"aten::detach", "", false, false},
                          Row{"aten::alias", "", true, false}, Row{"aten::zeros_like", "", false, false},
                          Row{"aten::equal", "", false, false}}) {
    INFO(row.name);
    CHECK(info(row.name, row.overload).stands_for_unsharded == row.stands_for_unsharded);
    CHECK(info(row.name, row.overload).records_whole == row.records_whole);
  }
}

TEST_CASE("views need no data, and what may copy leaves that to its parts", "[dtensor][operator_info]") {
  CHECK(info("aten::view").is_view);
  CHECK(info("aten::zeros_like").is_view);
  CHECK_FALSE(info("aten::clone").is_view);
  CHECK(info("aten::clone").is_clone);
  CHECK(info("aten::reshape").is_transparent);
  CHECK_FALSE(info("aten::reshape").is_view);
  CHECK(info("aten::t_").changes_metadata);
}

}  // namespace fsdp::test
