#pragma once

#include <vector>

#include "group/group_parts.hpp"

namespace fsdp {

/// In a group's unsharded buffer. False: an extension keeps what is computed with, and the parameter's storage stays released.
/// A parameter without elements has a place, of no bytes.
inline bool has_unsharded_memory(const GroupParts& parts, size_t param) {
  return parts.layout.gathered().tensor_bytes(parts.layout.segment_of(param)) > 0 ||
         parts.params[param].spec.unsharded_bytes() == 0;
}

/// Lists the parameters that have such memory.
inline std::vector<NamedBytes> unsharded_places(const GroupParts& parts) {
  std::vector<NamedBytes> places;
  for (size_t i = 0; i < parts.params.size(); ++i)
    if (has_unsharded_memory(parts, i))
      places.push_back({parts.layout.unsharded_offset(i), parts.params[i].spec.unsharded_bytes(), parts.params[i].name()});
  return places;
}

}  // namespace fsdp
