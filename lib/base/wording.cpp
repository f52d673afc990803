#include "base/wording.hpp"

#include <atomic>

#include "fsdp/error.hpp"

namespace fsdp {

namespace {

std::atomic<Wording> g_wording{nullptr};

std::string worded(const std::string& text) {
  const Wording wording = g_wording;
  return wording == nullptr ? text : wording(text);
}

}  // namespace

void set_wording(Wording wording) { g_wording = wording; }

Error::Error(const std::string& message) : std::runtime_error(worded(message)) {}

}  // namespace fsdp
