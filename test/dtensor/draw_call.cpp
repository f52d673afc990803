#include "draw_call.hpp"

#include <algorithm>

#include "dtensor/rules/operator_call.hpp"
#include "hints.hpp"

namespace fsdp::test {

namespace {

using c10::IValue;
using c10::TypeKind;

bool has_tensors(const c10::TypePtr& type) {
  switch (type->kind()) {
    case TypeKind::TensorType: return true;
    case TypeKind::OptionalType: return has_tensors(type->castRaw<c10::OptionalType>()->getElementType());
    case TypeKind::ListType: return has_tensors(type->castRaw<c10::ListType>()->getElementType());
    default: return false;
  }
}

/// What a call's operands have in common.
struct Theme {
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
};

at::ScalarType draw_dtype(Draw& draw) {
  static const std::vector<at::ScalarType> dtypes = {
      at::kFloat, at::kFloat, at::kFloat,  at::kFloat, at::kFloat, at::kFloat, at::kFloat,    at::kDouble, at::kDouble, at::kLong,
      at::kLong,  at::kInt,   at::kShort, at::kByte,  at::kBool,  at::kBool,  at::kBFloat16, at::kHalf,   at::kComplexFloat};
  return draw.one_of(dtypes);
}

Theme draw_theme(Draw& draw) {
  Theme theme{.sizes = {}, .dtype = draw_dtype(draw)};
  theme.sizes.resize(static_cast<size_t>(draw.one_of<int64_t>({0, 1, 1, 2, 2, 2, 2, 3, 3, 4})));
  for (auto& size : theme.sizes) size = draw.one_of<int64_t>({0, 1, 1, 2, 2, 3, 3, 3, 4, 5, 5});
  return theme;
}

std::vector<int64_t> draw_sizes(Draw& draw, const Theme& theme) {
  auto sizes = theme.sizes;
  const int64_t kind = draw.between(0, 9);
  if (kind < 7 || sizes.empty()) return sizes;
  if (kind == 7) {
    sizes[static_cast<size_t>(draw.between(0, static_cast<int64_t>(sizes.size()) - 1))] = 1;
    return sizes;
  }
  if (kind == 8) {
    sizes.erase(sizes.begin(), sizes.begin() + draw.between(0, static_cast<int64_t>(sizes.size())));
    return sizes;
  }
  return draw.sizes(0, 3, 4);
}

/// Draws one argument after another.
class Arguments {
 public:
  Arguments(Draw& draw, const c10::OperatorHandle& op) : draw_(draw), op_(op), theme_(draw_theme(draw)) {}

  IValue value(const c10::Argument& argument, bool is_written) {
    name_ = argument.name();
    const bool has_default = argument.default_value().has_value();
    if (argument.is_out()) return at::empty({0}, at::TensorOptions().dtype(theme_.dtype));
    if (has_default && !is_written && draw_.between(0, 1) == 0) return *argument.default_value();
    length_ = argument.N() ? *argument.N() : 0;
    return of_type(argument.real_type());
  }

 private:
  int64_t ndim() const { return static_cast<int64_t>(theme_.sizes.size()); }
  bool is_name(std::initializer_list<std::string_view> names) const {
    return std::find(names.begin(), names.end(), name_) != names.end();
  }
  int64_t dim() { return ndim() == 0 ? draw_.between(-1, 0) : draw_.between(-ndim(), ndim() - 1); }

  at::Tensor tensor() {
    auto dtype = draw_.between(0, 7) == 0 ? draw_dtype(draw_) : theme_.dtype;
    if (is_name({"index", "indices", "target", "offsets"})) dtype = at::kLong;
    if (is_name({"mask", "condition"})) dtype = at::kBool;
    const auto drawn = draw_values(draw_, draw_sizes(draw_, theme_), dtype);
    return is_name({"index", "indices", "target"}) ? drawn.abs().clamp_max(1) : drawn;
  }

  IValue integer() {
    if (name_.starts_with("dim") || is_name({"axis", "axis0", "axis1", "start_dim", "end_dim"})) return dim();
    if (is_name({"dtype", "layout"})) return IValue();
    return draw_.between(0, name_ == "reduction" ? 2 : 3);
  }

  IValue integers() {
    std::vector<int64_t> values;
    if (name_.starts_with("dim") || is_name({"axis", "shifts"})) {
      for (int64_t d = 0; d < ndim(); ++d)
        if (draw_.between(0, 1) == 0) values.push_back(draw_.between(0, 2) == 0 ? d - ndim() : d);
      if (values.size() < static_cast<size_t>(length_)) values.resize(static_cast<size_t>(length_), 0);
      return values;
    }
    if (is_name({"size", "sizes", "shape"})) {
      auto sizes = theme_.sizes;
      if (draw_.between(0, 2) == 0)
        std::shuffle(sizes.begin(), sizes.end(), std::minstd_rand(static_cast<unsigned>(draw_.between(1, 99))));
      if (draw_.between(0, 3) == 0) sizes.insert(sizes.begin(), draw_.between(1, 2));
      return sizes;
    }
    const int64_t length = length_ > 0 ? length_ : draw_.between(0, ndim() + 1);
    for (int64_t i = 0; i < length; ++i) values.push_back(draw_.between(0, 2));
    return values;
  }

  IValue list(const c10::TypePtr& element) {
    const auto* optional = element->castRaw<c10::OptionalType>();
    const auto& of = optional != nullptr ? optional->getElementType() : element;
    if (of->kind() == TypeKind::IntType || of->kind() == TypeKind::SymIntType) return integers();
    c10::impl::GenericList generic(element);
    const int64_t length = draw_.between(1, 3);
    for (int64_t i = 0; i < length; ++i) generic.push_back(of_type(of));
    return generic;
  }

  IValue of_type(const c10::TypePtr& type) {
    switch (type->kind()) {
      case TypeKind::TensorType: return tensor();
      case TypeKind::OptionalType:
        return draw_.between(0, 1) == 0 ? IValue() : of_type(type->castRaw<c10::OptionalType>()->getElementType());
      case TypeKind::ListType: return list(type->castRaw<c10::ListType>()->getElementType());
      case TypeKind::IntType:
      case TypeKind::SymIntType: return integer();
      case TypeKind::FloatType: return name_ == "p" ? draw_.one_of<double>({0.5, 2.0, 1.0}) : draw_.one_of<double>({0.5, 0.25, 1.0, 2.0, 1e-5});
      case TypeKind::BoolType: return draw_.between(0, 1) == 0;
      case TypeKind::NumberType: return scalar();
      case TypeKind::ScalarTypeType:
        return static_cast<int64_t>(draw_.one_of<at::ScalarType>({at::kFloat, at::kDouble, at::kLong, at::kBool}));
      case TypeKind::MemoryFormatType:
        return static_cast<int64_t>(draw_.one_of<at::MemoryFormat>({at::MemoryFormat::Contiguous, at::MemoryFormat::Preserve}));
      case TypeKind::LayoutType: return static_cast<int64_t>(at::kStrided);
      case TypeKind::DeviceObjType: return c10::Device(at::kCPU);
      case TypeKind::StringType: return std::string("none");
      default: return IValue();
    }
  }

  IValue scalar() {
    if (draw_.between(0, 2) == 0) return draw_.between(0, 3);
    return draw_.one_of<double>({0.5, -1.5, 2.0, 1.0, 3.25});
  }

  Draw& draw_;
  const c10::OperatorHandle& op_;
  const Theme theme_;
  std::string name_;
  int64_t length_ = 0;
};

/// An `out` as large as the result is, which LibTorch itself finds: with other values in it.
void size_outs(Draw& draw, DrawnCall& call) {
  const auto& arguments = call.op.schema().arguments();
  bool has_outs = false;
  for (const auto& argument : arguments) has_outs |= argument.is_out();
  if (!has_outs) return;
  torch::jit::Stack stack(call.arguments.begin(), call.arguments.end());
  call.op.callBoxed(&stack);
  const auto resized = [&](const at::Tensor& out) {
    return draw_values(draw, out.sizes(), out.scalar_type());
  };
  for (size_t i = 0; i < arguments.size(); ++i)
    if (arguments[i].is_out()) replace_tensors(call.arguments[i], [&](const at::Tensor& out, int64_t) { return resized(out); });
}

}  // namespace

std::string base_name(const c10::OperatorHandle& op) {
  std::string name = op.schema().name().substr(6);
  const auto without = [&](std::string_view end) {
    if (name.size() > end.size() && name.ends_with(end)) name.resize(name.size() - end.size());
  };
  if (!name.ends_with("__")) without("_");
  without("_out");
  return name;
}

bool is_public(const std::string& name) { return !name.starts_with("_"); }

std::vector<c10::OperatorHandle> operators_with_tensors() {
  std::vector<c10::OperatorHandle> operators;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!name.name.starts_with("aten::")) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op) continue;
    bool takes_tensors = false;
    for (const auto& argument : op->schema().arguments()) takes_tensors |= has_tensors(argument.type());
    if (takes_tensors) operators.push_back(*op);
  }
  std::sort(operators.begin(), operators.end(), [](const auto& a, const auto& b) {
    return std::pair(base_name(a), toString(a.operator_name())) < std::pair(base_name(b), toString(b.operator_name()));
  });
  return operators;
}

bool is_random(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::nondeterministic_seeded) || generator_argument(op).has_value();
}

std::optional<size_t> generator_argument(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i)
    if (arguments[i].name() == "generator") return i;
  return std::nullopt;
}

bool is_written(const c10::OperatorHandle& op, size_t argument) {
  const auto* alias = op.schema().arguments()[argument].alias_info();
  return alias != nullptr && alias->isWrite();
}

at::Tensor draw_values(Draw& draw, c10::IntArrayRef sizes, at::ScalarType dtype) {
  // Multiples of a power of two: sums of a few of them are exact in any order.
  std::vector<double> values(static_cast<size_t>(c10::multiply_integers(sizes)));
  const bool are_whole = at::isIntegralType(dtype, false);
  for (auto& value : values)
    value = are_whole ? static_cast<double>(draw.between(0, 5)) : static_cast<double>(draw.between(-3072, 3072)) / 1024;
  if (at::isFloatingType(dtype) && !values.empty() && draw.between(0, 15) == 0) values[0] = std::nan("");
  const auto drawn = torch::tensor(values, at::kDouble);
  return (dtype == at::kBool ? drawn > 0 : drawn.to(dtype)).reshape(sizes);
}

DrawnCall draw_call(Draw& draw, const c10::OperatorHandle& op) {
  DrawnCall call{.op = op, .arguments = {}, .generator_seed = static_cast<uint64_t>(draw.between(1, 1 << 30))};
  Arguments by_schema(draw, op);
  const auto text = hint_for(draw, base_name(op), op.schema().overload_name());
  Hint hint(draw, text.value_or(""));
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = arguments[i];
    auto value = hint.value(argument.name(), argument.real_type());
    // What a hint leaves out is left out, if it may be.
    if (!value && text && argument.default_value() && !argument.is_out()) value = *argument.default_value();
    call.arguments.push_back(value ? *value : by_schema.value(argument, is_written(op, i)));
  }
  if (const auto generator = generator_argument(op)) call.arguments[*generator] = c10::IValue();
  size_outs(draw, call);
  return call;
}

}  // namespace fsdp::test
