#include "dispatch/operator_traits.hpp"

#include <array>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace fsdp {

namespace {

// Operators with tensor results that autograd does not connect to their input. A registered
// parameter under one of them is the shard: `torch::zeros_like(p)` is how optimizers make state.
bool returns_unconnected(std::string_view name) {
  static const std::unordered_set<std::string_view> names{
      "detach",     "detach_",    "zeros_like", "ones_like", "empty_like", "full_like",
      "rand_like",  "randn_like", "randint_like", "new_empty", "new_zeros", "new_ones",
      "new_full",   "new_empty_strided", "eq",  "ne",        "lt",         "le",
      "gt",         "ge",         "isnan",      "isinf",     "isfinite",   "isneginf",
      "isposinf",   "isreal",     "isclose",    "argmax",    "argmin",     "argsort",
      "nonzero",    "sign",       "signbit",    "bucketize", "logical_not", "logical_and",
      "logical_or", "logical_xor", "any",       "all",       "count_nonzero", "bernoulli"};
  return names.contains(name);
}

// Metadata only: what they return faults in by itself when somebody reads it. `reshape` and
// `contiguous` are not here: they may copy. Neither is anything that returns a copy.
bool is_metadata_view(std::string_view name) {
  static const std::unordered_set<std::string_view> names{
      "view",        "_unsafe_view", "t",          "transpose", "permute",       "expand",
      "expand_as",   "select",       "slice",      "narrow",    "squeeze",       "unsqueeze",
      "detach",      "alias",        "view_as",    "as_strided", "unbind",       "split",
      "chunk",       "split_with_sizes", "diagonal", "unfold",  "movedim",       "swapaxes",
      "numpy_T",     "mT",           "mH",         "_reshape_alias", "view_as_real",
      "view_as_complex", "unflatten", "tensor_split", "adjoint", "swapdims",      "zeros_like",
      "ones_like",   "empty_like",   "full_like",  "rand_like", "randn_like",    "new_empty",
      "new_zeros",   "new_ones",     "new_full",   "new_empty_strided", "is_same_size",
      "sym_size",    "sym_stride",   "sym_numel",  "sym_storage_offset", "size", "stride",
      "_has_compatible_shallow_copy_type", "is_set_to", "is_complex", "is_floating_point",
      "is_signed",   "is_inference", "is_pinned",  "result_type", "_has_same_storage_numel",
      "is_neg",      "is_conj",     "dim",         "numel",
      "requires_grad_", "retain_grad", "is_leaf",  "output_nr", "_version",      "data"};
  return names.contains(name);
}

bool is_view_or_copy(std::string_view name) {
  static const std::unordered_set<std::string_view> names{
      "reshape", "reshape_as", "flatten", "contiguous", "ravel", "to", "type_as"};
  return names.contains(name);
}

OperatorTraits read(const c10::FunctionSchema& schema, const c10::OperatorHandle& op) {
  constexpr std::string_view kAten = "aten::";
  OperatorTraits traits;
  std::string_view name = schema.name();
  traits.is_aten = name.starts_with(kAten);
  if (traits.is_aten) name.remove_prefix(kAten.size());

  bool returns_tensor = false;
  for (const auto& result : schema.returns()) {
    const auto kind = result.type()->kind();
    returns_tensor |= kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType ||
                      kind == c10::TypeKind::OptionalType;
  }
  traits.is_differentiable = returns_tensor && !(traits.is_aten && returns_unconnected(name));
  traits.is_clone = traits.is_aten && name == "clone";
  traits.is_view = traits.is_aten && is_metadata_view(name);
  traits.is_transparent = traits.is_aten && is_view_or_copy(name);
  for (size_t i = 0; i < schema.arguments().size() && i < 64; ++i)
    if (schema.arguments()[i].name().starts_with("running_")) traits.statistics |= uint64_t{1} << i;
  traits.changes_metadata = op.hasTag(at::Tag::inplace_view);
  // record_stream declares a write and makes none.
  if (traits.is_aten && name == "record_stream") return traits;
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size() && i < 64; ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite()) traits.writes |= uint64_t{1} << i;
  }
  return traits;
}

const OperatorTraits& look_up(const c10::FunctionSchema& schema, const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<OperatorTraits>> known;
  std::lock_guard lock(mutex);
  auto& traits = known[&schema];
  if (!traits) traits = std::make_unique<OperatorTraits>(read(schema, op));
  return *traits;
}

}  // namespace

const OperatorTraits& traits_of(const c10::OperatorHandle& op) {
  struct Slot {
    const c10::FunctionSchema* schema = nullptr;
    const OperatorTraits* traits = nullptr;
  };
  // A direct-mapped cache in front of the map: schemas live as long as their registration.
  thread_local std::array<Slot, 256> cache;
  const auto& schema = op.schema();
  auto& slot = cache[(reinterpret_cast<uintptr_t>(&schema) >> 6) % cache.size()];
  if (slot.schema != &schema) slot = {&schema, &look_up(schema, op)};
  return *slot.traits;
}

}  // namespace fsdp
