#pragma once

#include <string>

#include "comm/c10d/c10d_communicator.hpp"
#include "comm/gloo/gloo_backend.hpp"

namespace fsdp {

/// Makes backends of the kind that c10d calls "gloo" or "nccl" (which takes the timeout alone of the options);
/// empty for any other.
BackendFactory backend_factory(const std::string& kind, const GlooOptions& options);

}  // namespace fsdp
