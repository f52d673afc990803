#include "base/wording.hpp"

#include <atomic>
#include <utility>

#include "fsdp/error.hpp"

namespace fsdp {

namespace {

std::atomic<Wording> g_wording{nullptr};

}  // namespace

void set_wording(Wording wording) { g_wording = wording; }

std::string worded(std::string text) {
  const Wording wording = g_wording;
  return wording == nullptr ? text : wording(std::move(text));
}

Error::Error(const std::string& message) : std::runtime_error(worded(message)) {}

}  // namespace fsdp
