#include "schedule/exec_order.hpp"

#include <algorithm>

namespace fsdp {

void ExecOrder::begin_pass() {
  if (in_pass_) end_pass();
  in_pass_ = true;
  uses_.clear();
  beside_.clear();
  position_ = 0;
  follows_ = !learned_.empty();
  std::fill(last_seen_.begin(), last_seen_.end(), std::nullopt);
}

void ExecOrder::end_pass() {
  if (!in_pass_) return;
  in_pass_ = false;
  // Kept to the learned order, to its end or not: a shorter pass (a loop that left early) is not a
  // new order yet, but one that never reaches the end should be.
  // What operators read together may have changed, in a pass that went through it once.
  const bool reads_alike = uses_.size() != learned_.size() || beside_ == learned_beside_;
  const bool complete = follows_ && position_ == learned_.size() && reads_alike;
  if (!complete && !uses_.empty() && !recording_overflowed()) learn(uses_, beside_);
  if (recording_overflowed()) clear();
  follows_ = false;
}

void ExecOrder::abandon_pass() {
  in_pass_ = false;
  follows_ = false;
  uses_.clear();
  beside_.clear();
}

void ExecOrder::clear() {
  abandon_pass();
  learn({}, {});
}

ExecOrder::Progress ExecOrder::use(int group, std::span<const int> operands, Repeats repeats) {
  if (!in_pass_ || (!uses_.empty() && uses_.back() == group)) return Progress::kGoesOn;
  if (!recording_overflowed()) {
    uses_.push_back(group);
    if (operands.size() > 1)
      for (const int other : operands)
        if (other != group) beside_.push_back({uses_.size() - 1, other});
  }
  if (!follows_) return Progress::kGoesOn;
  auto progress = Progress::kGoesOn;
  if (repeats == Repeats::kAsLearned && position_ == learned_.size() && learned_.front() == group) {
    position_ = 0;
    std::fill(last_seen_.begin(), last_seen_.end(), std::nullopt);
    progress = Progress::kStartedOver;
  }
  if (position_ == learned_.size() || learned_[position_] != group) {
    follows_ = false;
    return progress;
  }
  last_seen_[static_cast<size_t>(group)] = position_++;
  return progress;
}

bool ExecOrder::would_start_over(std::span<const int> groups, Repeats repeats) const {
  if (!in_pass_ || !follows_ || repeats != Repeats::kAsLearned) return false;
  size_t position = position_;
  int last = uses_.empty() ? -1 : uses_.back();
  for (const int group : groups) {
    if (group == last) continue;
    if (position == learned_.size()) return learned_.front() == group;
    if (learned_[position++] != group) return false;
    last = group;
  }
  return false;
}

std::optional<size_t> ExecOrder::distance_to_next_use(int group) const {
  const auto index = static_cast<size_t>(group);
  if (index >= first_.size() || !first_[index]) return std::nullopt;
  const size_t next = last_seen_[index] ? next_same_[*last_seen_[index]] : *first_[index];
  if (next >= learned_.size() || next < position_) return std::nullopt;
  return next - position_;
}

std::optional<size_t> ExecOrder::last_use(int group) const {
  const auto index = static_cast<size_t>(group);
  return index < last_seen_.size() ? last_seen_[index] : std::nullopt;
}

const std::vector<int>& ExecOrder::upcoming(size_t count) const {
  auto& groups = upcoming_;
  groups.clear();
  const int current = position_ == 0 ? -1 : learned_[position_ - 1];
  for (size_t i = position_; i < learned_.size() && groups.size() < count; ++i)
    if (learned_[i] != current && std::find(groups.begin(), groups.end(), learned_[i]) == groups.end())
      groups.push_back(learned_[i]);
  return groups;
}

void ExecOrder::learn(std::vector<int> uses, std::vector<Beside> beside) {
  learned_ = std::move(uses);
  learned_beside_ = std::move(beside);
  ++lessons_;
  const int groups = learned_.empty() ? 0 : *std::max_element(learned_.begin(), learned_.end()) + 1;
  first_.assign(groups, std::nullopt);
  last_seen_.assign(groups, std::nullopt);
  next_same_.assign(learned_.size(), learned_.size());
  for (size_t i = learned_.size(); i-- > 0;) {
    auto& first = first_[learned_[i]];
    if (first) next_same_[i] = *first;
    first = i;
  }
}

}  // namespace fsdp
