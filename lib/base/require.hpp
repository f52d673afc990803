#pragma once

#include <fmt/format.h>

#include "fsdp/error.hpp"

namespace fsdp {

/// Throws UsageError with the formatted message unless `condition`.
template <class... Args>
void require(bool condition, fmt::format_string<Args...> message, Args&&... args) {
  if (!condition) [[unlikely]]
    throw UsageError(fmt::format(message, std::forward<Args>(args)...));
}

/// Throws StateError with the formatted message unless `condition`.
template <class... Args>
void require_state(bool condition, fmt::format_string<Args...> message, Args&&... args) {
  if (!condition) [[unlikely]]
    throw StateError(fmt::format(message, std::forward<Args>(args)...));
}

}  // namespace fsdp
