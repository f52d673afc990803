#include "trace/collective_log.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "base/stable_hash.hpp"
#include "comm/work.hpp"

namespace fsdp {

const OperationNames& names_of(Operation operation) {
  static constexpr OperationNames kNames[] = {
      {"all_gather", "FSDP::all_gather", "FSDP::all_gather_wait"},
      {"reduce_scatter", "FSDP::reduce_scatter", "FSDP::reduce_scatter_wait"},
      {"all_reduce", "FSDP::all_reduce", "FSDP::all_reduce_wait"},
  };
  return kNames[static_cast<size_t>(operation)];
}

void CollectiveLog::introduce(int group, std::string name, std::vector<std::string> params) {
  std::lock_guard lock(mutex_);
  const auto index = static_cast<size_t>(group);
  if (index >= subjects_.size()) subjects_.resize(index + 1);
  const uint64_t hash = stable_hash(name);
  subjects_[index] = {std::move(name), hash, std::move(params)};
}

std::string CollectiveLog::name_of_group(int group) const {
  std::lock_guard lock(mutex_);
  return knows(group) ? subjects_[static_cast<size_t>(group)].name : "";
}

void CollectiveLog::note(const CollectiveEntry& entry) {
  std::lock_guard lock(mutex_);
  uint64_t hash = mixed_hash(subjects_[static_cast<size_t>(entry.group)].hash,
                        static_cast<uint64_t>(entry.operation) << 32 |
                            static_cast<uint64_t>(entry.dtype) << 24 |
                            static_cast<uint64_t>(entry.ranks));
  hash = mixed_hash(mixed_hash(hash, static_cast<uint64_t>(entry.bytes)), entry.params);
  position_.hash = mixed_hash(position_.hash, hash);
  step_hash_ = mixed_hash(step_hash_, hash) | 1;
  kept_[position_.count++ % kKept] = {entry, position_.hash};
}

CollectiveLog::Position CollectiveLog::position() const {
  std::lock_guard lock(mutex_);
  return position_;
}

bool CollectiveLog::end_step() {
  std::lock_guard lock(mutex_);
  const uint64_t hash = std::exchange(step_hash_, 0);
  if (hash == 0) return false;  // nothing was launched
  if (std::find(known_steps_.begin(), known_steps_.end(), hash) != known_steps_.end()) return false;
  known_steps_[next_known_++ % known_steps_.size()] = hash;
  return true;
}

void CollectiveLog::abandon_step() {
  std::lock_guard lock(mutex_);
  step_hash_ = 0;
}

std::string CollectiveLog::describe(const CollectiveEntry& entry) const {
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
  return fmt::format("{} of {} ({} bytes, {}{}) over {} ranks", names_of(entry.operation).plain, subject.name,
                     with_separators(entry.bytes), c10::toString(entry.dtype), of_params, entry.ranks);
}

CollectiveLog::Window CollectiveLog::window() const {
  std::lock_guard lock(mutex_);
  Window window;
  window.first = position_.count - std::min<uint64_t>(position_.count, kKept);
  for (uint64_t i = window.first; i < position_.count; ++i)
    window.entries.push_back({kept_[i % kKept].hash, describe(kept_[i % kKept].entry)});
  return window;
}

}  // namespace fsdp
