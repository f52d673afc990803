#include "dispatch/host_error.hpp"

#include <atomic>

namespace fsdp {

namespace {
std::atomic<KeepHostError> keep_by_host = nullptr;
}

void set_keep_host_error(KeepHostError keep) { keep_by_host = keep; }

void keep_host_error(const std::exception& error) {
  if (const auto keep = keep_by_host.load()) keep(error);
}

}  // namespace fsdp
