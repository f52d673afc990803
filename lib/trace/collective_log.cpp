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

void CollectiveLog::count_between(std::shared_ptr<GroupPlace> group) {
  std::lock_guard lock(mutex_);
  counted_ = std::move(group);
  // What came before the first entry is the business of the roots that were there.
  if (counted_) counted_before_ = counted_->awaited().count();
}

/// Returns how many collectives were awaited between the last entry and the one that is about to be noted. There is a group to
/// count of.
uint64_t CollectiveLog::take_between() {
  const uint64_t count = counted_->awaited().count();
  const uint64_t between = count - std::exchange(counted_before_, count);
  if (between == 0) return 0;
  constexpr size_t kTexts = 16;
  last_between_.emplace_back(position_.count, counted_->awaited().state().last);
  if (last_between_.size() > kTexts) last_between_.pop_front();
  return between;
}

void CollectiveLog::note(const CollectiveEntry& entry) {
  std::lock_guard lock(mutex_);
  const uint64_t between = counted_ ? take_between() : 0;
  uint64_t hash = mixed_hash(subjects_[static_cast<size_t>(entry.group)].hash,
                        static_cast<uint64_t>(entry.operation) << 32 |
                            static_cast<uint64_t>(entry.dtype) << 24 |
                            static_cast<uint64_t>(entry.ranks));
  hash = mixed_hash(mixed_hash(hash, static_cast<uint64_t>(entry.bytes)), entry.params);
  if (between > 0) hash = mixed_hash(hash, between);
  position_.hash = mixed_hash(position_.hash, hash);
  step_hash_ = mixed_hash(step_hash_, hash) | 1;
  kept_[position_.count++ % kKept] = {entry, position_.hash, between};
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

std::string CollectiveLog::describe(const Kept& kept, uint64_t index) const {
  const auto& entry = kept.entry;
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
  auto text = fmt::format("{} of {} ({} bytes, {}{}) over {} ranks", names_of(entry.operation).plain, subject.name,
                          with_separators(entry.bytes), c10::toString(entry.dtype), of_params, entry.ranks);
  const auto last = std::find_if(last_between_.begin(), last_between_.end(),
                                 [&](const auto& known) { return known.first == index; });
  if (last != last_between_.end())
    text += kept.between == 1 ? fmt::format(", after {}", last->second)
                              : fmt::format(", after {} collectives of no group, the last {}", kept.between, last->second);
  return text;
}

CollectiveLog::Window CollectiveLog::window() const {
  std::lock_guard lock(mutex_);
  Window window;
  window.first = position_.count - std::min<uint64_t>(position_.count, kKept);
  for (uint64_t i = window.first; i < position_.count; ++i)
    window.entries.push_back({kept_[i % kKept].hash, describe(kept_[i % kKept], i), kept_[i % kKept].between});
  if (counted_) {
    window.between = counted_->awaited().state();
    window.between.count -= counted_before_;
  }
  return window;
}

}  // namespace fsdp
