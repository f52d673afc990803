#include "trace/desync/host_activity.hpp"

#include <fmt/format.h>

namespace fsdp {

HostActivity::Snapshot HostActivity::snapshot() const {
  const uint64_t number = number_.load(std::memory_order_acquire);
  if (number % 2 == 1) return {.number = number, .place = Whereabouts::kInCollective};
  return {.number = number, .place = in_step_.load(std::memory_order_relaxed) ? Whereabouts::kInStep : Whereabouts::kOutside};
}

std::string HostActivity::waits_for() const {
  if (snapshot().place != Whereabouts::kInCollective) return "";
  const uint64_t waits_for = waits_for_.load(std::memory_order_relaxed);
  return fmt::format("{} of {}", names_of(static_cast<Operation>(waits_for >> 32)).plain,
                     log_->name_of_group(static_cast<int>(waits_for & 0xFFFFFFFF)));
}

RankReport HostActivity::report() const {
  RankReport report{.rank = rank_, .window = log_->window()};
  if (has_failed_.load(std::memory_order_relaxed)) {
    report.state = RankReport::State::kFailed;
    return report;
  }
  report.waits_for = waits_for();
  if (report.waits_for.empty() && watch_)
    if (const auto awaited = watch_->awaits(); !awaited.empty())
      report.waits_for = awaited + ", which belongs to no group of the model";
  if (!report.waits_for.empty()) report.state = RankReport::State::kInCollective;
  return report;
}

}  // namespace fsdp
