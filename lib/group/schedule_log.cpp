#include "group/schedule_log.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "comm/work.hpp"

namespace fsdp {

namespace {

/// Mixes a value into a hash that all ranks compute alike.
uint64_t mixed(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15ULL;
  return hash ^ (hash >> 29);
}

uint64_t hash_of(const std::string& text) {
  uint64_t hash = text.size();
  for (const char c : text) hash = mixed(hash, static_cast<unsigned char>(c));
  return hash;
}

}  // namespace

const char* name_of(Operation operation) {
  switch (operation) {
    case Operation::kAllGather:
      return "all_gather";
    case Operation::kReduceScatter:
      return "reduce_scatter";
    case Operation::kAllReduce:
      return "all_reduce";
  }
  return "collective";
}

void ScheduleLog::introduce(int group, std::string name, std::vector<std::string> params) {
  std::lock_guard lock(mutex_);
  const auto index = static_cast<size_t>(group);
  if (index >= subjects_.size()) subjects_.resize(index + 1);
  const uint64_t hash = hash_of(name);
  subjects_[index] = {std::move(name), hash, std::move(params)};
}

std::string ScheduleLog::name_of_group(int group) const {
  std::lock_guard lock(mutex_);
  return knows(group) ? subjects_[static_cast<size_t>(group)].name : "";
}

void ScheduleLog::note(const ScheduleEntry& entry) {
  std::lock_guard lock(mutex_);
  uint64_t hash = mixed(subjects_[static_cast<size_t>(entry.group)].hash,
                        static_cast<uint64_t>(entry.operation) << 32 |
                            static_cast<uint64_t>(entry.dtype) << 24 |
                            static_cast<uint64_t>(entry.ranks));
  hash = mixed(mixed(hash, static_cast<uint64_t>(entry.bytes)), entry.params);
  position_.hash = mixed(position_.hash, hash);
  step_hash_ = mixed(step_hash_, hash) | 1;
  kept_[position_.count++ % kKept] = {entry, position_.hash};
}

ScheduleLog::Position ScheduleLog::position() const {
  std::lock_guard lock(mutex_);
  return position_;
}

bool ScheduleLog::end_step() {
  std::lock_guard lock(mutex_);
  const uint64_t hash = std::exchange(step_hash_, 0);
  if (hash == 0) return false;  // nothing was launched
  if (std::find(known_steps_.begin(), known_steps_.end(), hash) != known_steps_.end()) return false;
  known_steps_[next_known_++ % known_steps_.size()] = hash;
  return true;
}

void ScheduleLog::abandon_step() {
  std::lock_guard lock(mutex_);
  step_hash_ = 0;
}

std::string ScheduleLog::describe(const ScheduleEntry& entry) const {
  const auto& subject = subjects_[static_cast<size_t>(entry.group)];
  const size_t known = std::min<size_t>(subject.params.size(), 63);
  std::vector<std::string> names;
  for (size_t i = 0; i < known; ++i)
    if (entry.params >> i & 1) names.push_back(subject.params[i]);
  std::string of_params;
  if (names.size() < known) {
    constexpr size_t kSpelledOut = 4;
    const size_t more = names.size() - std::min(names.size(), kSpelledOut);
    names.resize(names.size() - more);
    of_params = fmt::format(", of {}{} alone", fmt::join(names, ", "),
                            more > 0 ? fmt::format(" and {} more", more) : "");
  }
  return fmt::format("{} of {} ({} bytes, {}{}) over {} ranks", name_of(entry.operation), subject.name,
                     with_separators(entry.bytes), c10::toString(entry.dtype), of_params, entry.ranks);
}

ScheduleLog::Window ScheduleLog::window() const {
  std::lock_guard lock(mutex_);
  Window window;
  window.first = position_.count - std::min<uint64_t>(position_.count, kKept);
  for (uint64_t i = window.first; i < position_.count; ++i)
    window.entries.push_back({kept_[i % kKept].hash, describe(kept_[i % kKept].entry)});
  return window;
}

}  // namespace fsdp
