#include "hints.hpp"

#include <torch/torch.h>

#include "draw_call.hpp"
#include "hint_rows.hpp"

namespace fsdp::test {

namespace {

std::vector<std::string_view> parts_of(std::string_view text, char between) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const auto end = text.find(between);
    if (end != 0) parts.push_back(text.substr(0, end));
    text = end == text.npos ? "" : text.substr(end + 1);
  }
  return parts;
}

bool names(std::string_view row, std::string_view base, std::string_view full) {
  for (const auto name : parts_of(row, ' '))
    if (name == base || name == full) return true;
  return false;
}

at::Tensor of_kind(Draw& draw, c10::IntArrayRef sizes, std::string_view kind) {
  const auto real = draw_values(draw, sizes, at::kDouble).nan_to_num(0.5);
  switch (kind.empty() ? 'f' : kind[0]) {
    case 'd': return real;
    case 'b': return real > 0;
    case 'o': return at::ones(sizes, at::kInt);
    case 'h': return real.to(at::kHalf);
    case 'g': return real.to(at::kBFloat16);
    case 'c': return at::complex(real.to(at::kFloat), draw_values(draw, sizes, at::kFloat).nan_to_num(0.5));
    case 'p': return real.to(at::kFloat).abs().div(4).add(0.125);
    case 'l':
    case 'i': {
      const int64_t below = std::stoll(std::string(kind.substr(1)));
      const auto whole = (real.abs() * 1024).to(at::kLong).remainder(std::max<int64_t>(below, 1));
      return kind[0] == 'l' ? whole : whole.to(at::kInt);
    }
    case 'u': {
      const auto root = real.to(at::kFloat);
      return at::matmul(root, root.mT()) + at::eye(root.size(-1)) * 2;
    }
    case 't': return real.to(at::kFloat).tril() + at::eye(real.size(-1)) * 4;
    default: return real.to(at::kFloat);
  }
}

}  // namespace

std::optional<std::string_view> hint_for(Draw& draw, std::string_view base_name, std::string_view overload) {
  const auto full = std::string(base_name) + "." + std::string(overload);
  std::vector<std::string_view> texts;
  for (const auto& row : hint_rows())
    if (names(row.names, full, full)) texts.push_back(row.text);
  if (texts.empty())
    for (const auto& row : hint_rows())
      if (names(row.names, base_name, base_name)) texts.push_back(row.text);
  if (texts.empty()) return std::nullopt;
  return draw.one_of(texts);
}

Hint::Hint(Draw& draw, std::string_view text) : draw_(draw) {
  for (const auto part : parts_of(text, ' ')) {
    const auto at = part.find('=');
    texts_.emplace(part.substr(0, at), part.substr(at + 1));
  }
}

std::optional<c10::IValue> Hint::value(const std::string& argument, const c10::TypePtr& type) {
  const auto found = texts_.find(argument);
  if (found == texts_.end()) return std::nullopt;
  return parsed(found->second, type);
}

int64_t Hint::number(std::string_view text) {
  int64_t product = 1;  // "2C" is twice what C is
  std::string digits;
  for (const char c : text) {
    if (std::isupper(c) == 0) {
      digits += c;
      continue;
    }
    auto [it, is_new] = letters_.emplace(c, 0);
    if (is_new) it->second = draw_.between(1, 4);
    product *= it->second;
  }
  return digits.empty() ? product : product * std::stoll(digits);
}

std::vector<int64_t> Hint::numbers(std::string_view text, char between) {
  std::vector<int64_t> values;
  for (const auto part : parts_of(text, between)) values.push_back(number(part));
  return values;
}

at::Tensor Hint::tensor(std::string_view text) {
  const auto colon = text.find(':');
  const auto sizes = text.substr(0, colon);
  std::string kind(colon == text.npos ? "" : text.substr(colon + 1));
  if (kind.size() > 1) kind = kind[0] + std::to_string(number(std::string_view(kind).substr(1)));
  return of_kind(draw_, sizes == "()" ? std::vector<int64_t>() : numbers(sizes, 'x'), kind);
}

c10::IValue Hint::parsed(std::string_view text, const c10::TypePtr& type) {
  using Kind = c10::TypeKind;
  if (text == "~") return c10::IValue();
  switch (type->kind()) {
    case Kind::OptionalType: return parsed(text, type->castRaw<c10::OptionalType>()->getElementType());
    case Kind::TensorType: return tensor(text);
    case Kind::BoolType: return text == "true";
    case Kind::StringType: return std::string(text == "''" ? "" : text);
    case Kind::FloatType: return std::stod(std::string(text));
    case Kind::NumberType:
      if (text.find('.') != text.npos) return std::stod(std::string(text));
      return number(text);
    case Kind::ListType: {
      const auto& element = type->castRaw<c10::ListType>()->getElementType();
      c10::impl::GenericList list(element);
      if (element->kind() == Kind::IntType || element->kind() == Kind::SymIntType) {
        if (text == "()") return std::vector<int64_t>();
        return numbers(text, '|');
      }
      if (element->kind() == Kind::FloatType) {
        c10::List<double> doubles;
        for (const auto part : parts_of(text, '|')) doubles.push_back(std::stod(std::string(part)));
        return doubles;
      }
      if (element->kind() == Kind::BoolType) {
        c10::List<bool> bools;
        for (const auto part : parts_of(text, '|')) bools.push_back(part == "true");
        return bools;
      }
      for (const auto part : parts_of(text, '|')) list.push_back(parsed(part, element));
      return list;
    }
    default: return number(text);
  }
}

}  // namespace fsdp::test
