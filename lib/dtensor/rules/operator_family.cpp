#include "dtensor/rules/operator_family.hpp"

#include <algorithm>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace fsdp {

namespace {

using Names = std::unordered_set<std::string_view>;

bool is_unconnected(std::string_view name) {
  static const Names names{"detach", "detach_", "alias"};
  return names.contains(name) || name.ends_with("_like") || name.starts_with("new_");
}

/// Batch norms write what their schemas do not say that they write.
bool is_written_unsaid(std::string_view name, std::string_view argument) {
  return (argument == "running_mean" || argument == "running_var") && name.find("batch_norm") != name.npos &&
         name.find("backward") == name.npos;
}

bool is_reduction(std::string_view name) {
  static const Names names{"sum", "mean", "norm", "linalg_vector_norm", "max", "min", "amax", "amin", "any", "all", "prod"};
  return names.contains(name);
}

bool draws_in_place(std::string_view name) {
  static const Names names{"normal_", "uniform_",    "random_",    "exponential_",
                           "cauchy_", "log_normal_", "geometric_", "bernoulli_"};
  return names.contains(name);
}

/// Beside those that LibTorch tags so.
bool is_pointwise(std::string_view name) {
  static const Names names{"copy_", "zero_", "fill_", "_to_copy", "rsub", "masked_fill", "masked_fill_",
                           "_amp_foreach_non_finite_check_and_unscale_"};
  static const Names not_pointwise{"_foreach_max", "_foreach_mm", "_foreach_powsum", "_foreach_norm"};
  if (name.starts_with("_foreach_")) return !not_pointwise.contains(name);
  return names.contains(name) || name.starts_with("_fused_adam") || name.starts_with("_fused_sgd") ||
         name.starts_with("_fused_adagrad");
}

/// Work along the dimension `dim`, or `dims`, and leave the others alone. Results have the operand's sizes, but along `dim`.
bool works_along_dim(std::string_view name) {
  static const Names names{"softmax", "_softmax", "log_softmax",  "_log_softmax", "cumsum",    "cumsum_",
                           "cumprod", "cumprod_", "logcumsumexp", "sort",         "argsort",   "topk",
                           "flip",    "argmax",   "argmin",       "roll",         "logsumexp", "cummax",
                           "cummin",  "kthvalue", "mode",         "nansum",       "aminmax",   "count_nonzero"};
  return names.contains(name);
}

/// Operators made of others that read memory themselves, show it as another dtype, or resize an `out`.
bool reads_memory(const c10::OperatorHandle& op, std::string_view name) {
  static const Names names{"choose_qparams_optimized", "mish_backward", "isreal", "istft"};
  const auto& arguments = op.schema().arguments();
  return names.contains(name) || std::any_of(arguments.begin(), arguments.end(), [](const auto& one) { return one.is_out(); });
}

/// torch 2.11 still has operators that take a dimension, or a list of them, by name. A DTensor's dimensions have no names.
bool is_name(const c10::TypePtr& type) {
  const auto list = type->cast<c10::ListType>();
  return (list ? list->getElementType() : type)->kind() == c10::TypeKind::StringType;
}

/// Views by a bit, which neither a piece nor a window of a DTensor has: they get a copy.
bool negates_lazily(std::string_view name) { return name == "_conj" || name == "_neg_view"; }

Family family_of(const c10::OperatorHandle& op, std::string_view name, const OperatorForm& form) {
  const auto& schema = op.schema();
  const auto& returns = schema.returns();
  const bool is_seeded = op.hasTag(at::Tag::nondeterministic_seeded);
  const bool returns_tensor = returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::TensorType;
  const bool returns_only_tensors = std::none_of(returns.begin(), returns.end(), [](const auto& result) {
    return result.type()->kind() != c10::TypeKind::TensorType && result.type()->kind() != c10::TypeKind::ListType;
  });
  const bool returns_view = std::any_of(returns.begin(), returns.end(), [](const auto& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  });
  using enum Family;
  if (name == "_has_compatible_shallow_copy_type") return kMayTakeData;
  if (name == "contiguous" || negates_lazily(name)) return kGeneral;
  if (name == "detach_") return kKept;
  if (name == "set_" && schema.overload_name() == "source_Tensor") return kSetData;
  if (op.hasTag(at::Tag::inplace_view) || name == "set_" || name == "resize_" || name == "resize_as_") return kRefused;
  if (draws_in_place(name)) return kDraw;
  if (form.dim >= 0 && is_name(schema.arguments()[static_cast<size_t>(form.dim)].type())) return kGeneral;
  // `equal` answers for the whole, and `positive` is its operand.
  if ((op.hasTag(at::Tag::pointwise) || is_pointwise(name)) && returns_only_tensors && !returns_view)
    return is_seeded ? kGeneral : kPointwise;
  if (name == "detach" || name == "alias") return kAlias;
  if (form.writes == 0) {
    if (returns_tensor && is_reduction(name) && op.hasTag(at::Tag::reduction)) return kReduce;
    if (name == "dot" || name == "vdot") return kDot;
    if (name == "_foreach_norm") return kForeachNorm;
    if (name.ends_with("_like")) return is_seeded ? kDrawLike : kLike;
    if (name.starts_with("new_")) return kNew;
  }
  if (works_along_dim(name)) return kAlongDim;
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) && !reads_memory(op, name)) return kComposite;
  return returns_view ? kView : kGeneral;
}

OperatorForm read(const c10::OperatorHandle& op) {
  constexpr std::string_view kAten = "aten::";
  const auto& schema = op.schema();
  std::string_view name = schema.name();
  const bool is_aten = name.starts_with(kAten);
  if (is_aten) name.remove_prefix(kAten.size());
  OperatorForm form;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    if ((argument.alias_info() != nullptr && argument.alias_info()->isWrite()) ||
        (is_aten && is_written_unsaid(name, argument.name())))
      form.writes |= uint64_t{1} << std::min<size_t>(i, 63);
    if (argument.name() == "dim" || argument.name() == "dims") form.dim = static_cast<int>(i);
    if (argument.name() == "keepdim") form.keepdim = static_cast<int>(i);
    if (argument.name() == "dtype") form.dtype = static_cast<int>(i);
    if (argument.name() == "memory_format") form.memory_format = static_cast<int>(i);
  }
  for (const auto& result : schema.returns()) {
    const auto kind = result.type()->kind();
    form.is_differentiable |= kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType;
  }
  if (is_aten && is_unconnected(name)) form.is_differentiable = false;
  if (name == "record_stream") form.writes = 0;
  form.family = is_aten ? family_of(op, name, form) : Family::kGeneral;
  return form;
}

}  // namespace

const OperatorForm& form_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, OperatorForm> known;
  const auto* schema = &op.schema();
  const auto it = known.find(schema);
  return it != known.end() ? it->second : known.emplace(schema, read(op)).first->second;
}

}  // namespace fsdp
