#include "dtensor/operator_info.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include "dtensor/operator_names.hpp"

namespace fsdp {

namespace {

using Name = OperatorName;

/// Batch norms write what their schemas do not say that they write.
bool is_written_unsaid(std::string_view name, std::string_view argument) {
  return (argument == "running_mean" || argument == "running_var") && name.find("batch_norm") != name.npos &&
         name.find("backward") == name.npos;
}

bool is_write(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool takes_out(const c10::FunctionSchema& schema) {
  return std::ranges::any_of(schema.arguments(), [](const auto& argument) { return argument.is_out(); });
}

/// torch 2.11 still has operators that take a dimension, or a list of them, by name. A DTensor's dimensions have no names.
bool is_name(const c10::TypePtr& type) {
  const auto list = type->cast<c10::ListType>();
  return (list ? list->getElementType() : type)->kind() == c10::TypeKind::StringType;
}

Family family_of(const c10::OperatorHandle& op, std::string_view name, uint32_t bits, const OperatorInfo& info) {
  const auto& schema = op.schema();
  const auto& returns = schema.returns();
  const bool is_seeded = op.hasTag(at::Tag::nondeterministic_seeded);
  const bool returns_tensor = returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::TensorType;
  const bool returns_only_tensors = std::ranges::none_of(returns, [](const auto& result) {
    return result.type()->kind() != c10::TypeKind::TensorType && result.type()->kind() != c10::TypeKind::ListType;
  });
  const bool returns_view = std::ranges::any_of(
      returns, [](const auto& result) { return result.alias_info() != nullptr && !result.alias_info()->isWrite(); });
  using enum Family;
  if (name == "_has_compatible_shallow_copy_type") return kMayTakeData;
  if (name == "contiguous" || (bits & Name::kNegatesLazily)) return kGeneral;
  if (name == "detach_") return kKept;
  if (name == "set_" && schema.overload_name() == "source_Tensor") return kSetData;
  if (info.changes_metadata || (bits & Name::kRefused)) return kRefused;
  if (bits & Name::kDrawsInPlace) return kDraw;
  if (info.arguments.dim >= 0 && is_name(schema.arguments()[static_cast<size_t>(info.arguments.dim)].type())) return kGeneral;
  // `equal` answers for the whole, and `positive` is its operand.
  if ((op.hasTag(at::Tag::pointwise) || (bits & Name::kPointwise)) && returns_only_tensors && !returns_view)
    return is_seeded ? kGeneral : kPointwise;
  if (name == "detach" || name == "alias") return kAlias;
  if (info.writes == 0) {
    if (returns_tensor && (bits & Name::kReduction) && op.hasTag(at::Tag::reduction)) return kReduce;
    if (name == "dot" || name == "vdot") return kDot;
    if (name == "_foreach_norm") return kForeachNorm;
    if (name.ends_with("_like")) return is_seeded ? kDrawLike : kLike;
    if (name.starts_with("new_")) return kNew;
  }
  if (bits & Name::kAlongDim) return kAlongDim;
  // Neither does one that resizes an `out`.
  const bool leaves_memory_to_others = !(bits & Name::kReadsMemory) && !takes_out(schema);
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) && leaves_memory_to_others) return kComposite;
  return returns_view ? kView : kGeneral;
}

void read_arguments(const c10::FunctionSchema& schema, std::string_view name, OperatorInfo& info) {
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = arguments[i];
    const auto bit = uint64_t{1} << std::min<size_t>(i, 63);
    const auto at = static_cast<int8_t>(i);
    if (is_write(argument)) info.declared_writes |= bit;
    if (info.is_aten && is_written_unsaid(name, argument.name())) info.writes |= bit;
    if (argument.name().starts_with("running_")) info.statistics |= bit;
    if (argument.name() == "dim" || argument.name() == "dims") info.arguments.dim = at;
    if (argument.name() == "keepdim") info.arguments.keepdim = at;
    if (argument.name() == "dtype") info.arguments.dtype = at;
    if (argument.name() == "memory_format") info.arguments.memory_format = at;
  }
  if (name == "record_stream") info.declared_writes = 0;  // it declares a write and makes none
  info.writes |= info.declared_writes;
}

OperatorInfo read(const c10::OperatorHandle& op) {
  constexpr std::string_view kAten = "aten::";
  const auto& schema = op.schema();
  std::string_view name = schema.name();
  OperatorInfo info;
  info.is_aten = name.starts_with(kAten);
  if (info.is_aten) name.remove_prefix(kAten.size());
  const uint32_t bits = info.is_aten ? bits_of_name(name) : 0;
  info.is_clone = info.is_aten && name == "clone";
  info.is_view = (bits & Name::kReadsNoData) != 0;
  info.is_transparent = (bits & Name::kMayCopy) != 0;
  info.changes_metadata = op.hasTag(at::Tag::inplace_view);
  read_arguments(schema, name, info);

  bool returns_tensors = false, returns_optional = false;
  for (const auto& result : schema.returns()) {
    const auto kind = result.type()->kind();
    returns_tensors |= kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType;
    returns_optional |= kind == c10::TypeKind::OptionalType;
  }
  info.stands_for_unsharded = (returns_tensors || returns_optional) && !(bits & Name::kMeansShard);
  if (info.is_aten) info.family = family_of(op, name, bits, info);
  // One that is made of others leaves it to them: what they record is gathered once, not by each.
  const bool has_no_gradient = (bits & Name::kWithoutGradient) && info.family != Family::kComposite;
  info.records_whole = returns_tensors && !(bits & Name::kUnconnected) && !has_no_gradient;
  return info;
}

const OperatorInfo& look_up(const c10::FunctionSchema& schema, const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<OperatorInfo>> known;
  std::lock_guard lock(mutex);
  auto& info = known[&schema];
  if (!info) info = std::make_unique<OperatorInfo>(read(op));
  return *info;
}

}  // namespace

const OperatorInfo& info_of(const c10::OperatorHandle& op) {
  struct Cached {
    const c10::FunctionSchema* schema = nullptr;
    const OperatorInfo* info = nullptr;
  };
  // A direct-mapped cache in front of the map: schemas live as long as their registration.
  thread_local std::array<Cached, 256> cache;
  const auto& schema = op.schema();
  auto& cached = cache[(reinterpret_cast<uintptr_t>(&schema) >> 6) % cache.size()];
  if (cached.schema != &schema) cached = {&schema, &look_up(schema, op)};
  return *cached.info;
}

}  // namespace fsdp
