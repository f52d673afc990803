#include "comm/backend_factory.hpp"

#include "comm/nccl/nccl_backend.hpp"

namespace fsdp {

BackendFactory backend_factory(const std::string& kind, const GlooOptions& options) {
  if (kind == "gloo")
    return [options](const auto& store, int rank, int size) { return make_gloo_backend(store, rank, size, options); };
  if (kind == "nccl")
    return [timeout = options.timeout](const auto& store, int rank, int size) {
      return make_nccl_backend(store, rank, size, timeout);
    };
  return {};
}

}  // namespace fsdp
