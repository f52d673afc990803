#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

// Tensors in what a module's forward is called with, and returns.
namespace fsdp::detail {

template <class T>
inline constexpr bool holds_tensors = std::is_same_v<T, at::Tensor>;
template <class T>
inline constexpr bool holds_tensors<std::optional<T>> = holds_tensors<T>;
template <class T, class Allocator>
inline constexpr bool holds_tensors<std::vector<T, Allocator>> = holds_tensors<T>;
template <class T, size_t count>
inline constexpr bool holds_tensors<std::array<T, count>> = holds_tensors<T>;
template <class Key, class T, class... Rest>
inline constexpr bool holds_tensors<std::map<Key, T, Rest...>> = holds_tensors<T>;
template <class Key, class T, class... Rest>
inline constexpr bool holds_tensors<std::unordered_map<Key, T, Rest...>> = holds_tensors<T>;
template <class First, class Second>
inline constexpr bool holds_tensors<std::pair<First, Second>> =
    holds_tensors<First> || holds_tensors<Second>;
template <class... Elements>
inline constexpr bool holds_tensors<std::tuple<Elements...>> = (... || holds_tensors<Elements>);

/// Calls `visit` with each tensor in `value`: alone, or in an optional, a vector, an array, a map, a pair
/// or a tuple of such.
template <class Visit, class Value>
void visit_tensors(const Visit& visit, Value& value) {
  if constexpr (std::is_same_v<Value, at::Tensor>) {
    visit(value);
  } else if constexpr (!holds_tensors<Value>) {
    return;
  } else if constexpr (requires { value.has_value(); }) {
    if (value) visit_tensors(visit, *value);
  } else if constexpr (requires { value.begin(); }) {
    for (auto& element : value) visit_tensors(visit, element);
  } else {
    std::apply([&](auto&... elements) { (visit_tensors(visit, elements), ...); }, value);
  }
}

/// `value` with `change` applied to every tensor in it. What holds none as it came, a reference if it was one.
template <class Change, class Value>
decltype(auto) map_tensors(const Change& change, Value&& value) {
  using Plain = std::remove_cvref_t<Value>;
  if constexpr (!holds_tensors<Plain>) {
    return std::forward<Value>(value);
  } else {
    Plain changed(std::forward<Value>(value));
    visit_tensors([&](at::Tensor& tensor) { tensor = change(tensor); }, changed);
    return changed;
  }
}

}  // namespace fsdp::detail
