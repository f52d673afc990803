#include "fsdp/version.hpp"

#include <fmt/format.h>

#include <string>

namespace fsdp {

const char* version() {
  static const std::string text = fmt::format("{}.{}.{}", FSDP_VERSION_MAJOR, FSDP_VERSION_MINOR, FSDP_VERSION_PATCH);
  return text.c_str();
}

}  // namespace fsdp
