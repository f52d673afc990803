#include "base/fault_log.hpp"

#include <utility>

#include "base/log.hpp"

namespace fsdp {

void FaultLog::add(const std::string& fault) {
  constexpr size_t kKept = 32;  // one cause is often seen many times
  auto text = fmt::format("rank {}: {}", rank_, fault);
  log().error("sanitizer: {}", text);
  const std::lock_guard lock(mutex_);
  if (faults_.size() < kKept) faults_.push_back(std::move(text));
}

std::vector<std::string> FaultLog::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(faults_, {});
}

}  // namespace fsdp
