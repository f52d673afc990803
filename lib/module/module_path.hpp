#pragma once

#include <string>

namespace fsdp {

/// The path of `name` below `path`, in LibTorch's notation: "blocks.3.weight". Either may be empty.
inline std::string join_path(const std::string& path, const std::string& name) {
  if (path.empty() || name.empty()) return path + name;
  return path + "." + name;
}

}  // namespace fsdp
