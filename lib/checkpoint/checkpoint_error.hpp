#pragma once

#include <fmt/format.h>

#include "fsdp/checkpoint_parts.hpp"

namespace fsdp {

/// Throws CheckpointError with the formatted message unless `condition`.
template <class... Args>
void require_checkpoint(bool condition, fmt::format_string<Args...> message, Args&&... args) {
  if (!condition) [[unlikely]]
    throw CheckpointError(fmt::format(message, std::forward<Args>(args)...));
}

}  // namespace fsdp
