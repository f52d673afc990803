#pragma once

#include <memory>

#include "group/gather/prepared_extension.hpp"

namespace fsdp {

class ParamGroup;

/// Parameter `index` of the group, laid out per parameter, is gathered by `extension` from the next gather on, and its
/// unsharded parameter needs no memory. Releases the group; no communication; the same on all ranks. Takes the root's lock.
/// Throws StateError inside a step.
void set_extension(ParamGroup& group, size_t index, std::shared_ptr<PreparedExtension> extension);

}  // namespace fsdp
