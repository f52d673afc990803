#pragma once

namespace fsdp {

/// Where a module is in its tree: when a depth-first walk over the modules of its root enters and leaves it.
struct TreeInterval {
  int enter = 0, exit = 0;
  /// It is around the other, or the same.
  bool encloses(const TreeInterval& other) const { return enter <= other.enter && other.exit <= exit; }
  bool operator==(const TreeInterval&) const = default;
};

}  // namespace fsdp
