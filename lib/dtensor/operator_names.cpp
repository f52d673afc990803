#include "dtensor/operator_names.hpp"

#include <initializer_list>
#include <unordered_map>

namespace fsdp {

namespace {

using Name = OperatorName;

struct Row {
  uint32_t bits;
  std::initializer_list<std::string_view> names;
};

/// A name may stand in several rows: its bits are all of theirs.
const Row kRows[] = {
    {Name::kUnconnected, {"detach", "detach_", "alias"}},
    {Name::kMeansShard, {"detach", "detach_", "sign", "bernoulli", "isclose", "isfinite", "isreal"}},
    {Name::kMeansShard | Name::kReadsNoData,
     {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_empty", "new_zeros", "new_ones",
      "new_full", "new_empty_strided"}},
    {Name::kMeansShard, {"randint_like"}},
    {Name::kMeansShard | Name::kWithoutGradient,
     {"eq",       "ne",       "lt",      "le",        "gt",      "ge",          "isnan",       "isinf",
      "isneginf", "isposinf", "argmax",  "argmin",    "argsort", "nonzero",     "signbit",     "bucketize",
      "any",      "all",      "logical_not", "logical_and", "logical_or", "logical_xor", "count_nonzero"}},
    {Name::kReadsNoData,
     {"view",         "_unsafe_view",    "t",              "transpose",        "permute",    "expand",    "expand_as",
      "select",       "slice",           "narrow",         "squeeze",          "unsqueeze",  "detach",    "alias",
      "view_as",      "as_strided",      "unbind",         "split",            "chunk",      "diagonal",  "unfold",
      "movedim",      "swapaxes",        "numpy_T",        "mT",               "mH",         "unflatten", "adjoint",
      "swapdims",     "_reshape_alias",  "view_as_real",   "view_as_complex",  "tensor_split", "split_with_sizes"}},
    {Name::kReadsNoData,
     {"is_same_size",       "sym_size",   "sym_stride", "sym_numel",    "sym_storage_offset", "size",      "stride",
      "is_set_to",          "is_complex", "is_signed",  "is_inference", "is_floating_point",  "is_pinned", "result_type",
      "is_neg",             "is_conj",    "dim",        "numel",        "requires_grad_",     "is_leaf",   "retain_grad",
      "output_nr",          "_version",   "data",       "_has_compatible_shallow_copy_type",  "_has_same_storage_numel"}},
    {Name::kMayCopy, {"reshape", "reshape_as", "flatten", "contiguous", "ravel", "to", "type_as"}},
    {Name::kReduction,
     {"sum", "mean", "norm", "linalg_vector_norm", "max", "min", "amax", "amin", "any", "all", "prod"}},
    {Name::kDrawsInPlace,
     {"normal_", "uniform_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_", "bernoulli_"}},
    {Name::kPointwise,
     {"copy_", "zero_", "fill_", "_to_copy", "rsub", "masked_fill", "masked_fill_",
      "_amp_foreach_non_finite_check_and_unscale_"}},
    {Name::kNotPointwise, {"_foreach_max", "_foreach_mm", "_foreach_powsum", "_foreach_norm"}},
    {Name::kAlongDim,
     {"softmax", "_softmax", "log_softmax",  "_log_softmax", "cumsum",    "cumsum_",   "cumprod", "cumprod_",
      "sort",    "argsort",  "logcumsumexp", "topk",         "flip",      "argmax",    "argmin",  "count_nonzero",
      "roll",    "cummax",   "logsumexp",    "cummin",       "kthvalue",  "mode",      "nansum",  "aminmax"}},
    {Name::kReadsMemory, {"choose_qparams_optimized", "mish_backward", "isreal", "istft"}},
    {Name::kNegatesLazily, {"_conj", "_neg_view"}},
    {Name::kRefused, {"set_", "resize_", "resize_as_"}},
};

/// Families of names, which LibTorch may add to.
uint32_t bits_by_pattern(std::string_view name) {
  uint32_t bits = 0;
  if (name.ends_with("_like") || name.starts_with("new_")) bits |= Name::kUnconnected;
  if (name.starts_with("_foreach_") || name.starts_with("_fused_adam") || name.starts_with("_fused_sgd") ||
      name.starts_with("_fused_adagrad"))
    bits |= Name::kPointwise;
  return bits;
}

}  // namespace

uint32_t bits_of_name(std::string_view name) {
  static const std::unordered_map<std::string_view, uint32_t> table = [] {
    std::unordered_map<std::string_view, uint32_t> bits;
    for (const auto& row : kRows)
      for (const auto one : row.names) bits[one] |= row.bits;
    return bits;
  }();
  const auto it = table.find(name);
  const uint32_t bits = bits_by_pattern(name) | (it == table.end() ? 0 : it->second);
  return (bits & Name::kNotPointwise) != 0 ? bits & ~static_cast<uint32_t>(Name::kPointwise) : bits;
}

}  // namespace fsdp
