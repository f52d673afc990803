#include "schedule/reduce_order.hpp"

#include <algorithm>
#include <utility>

namespace fsdp {

const char* name_of(ReduceScatterStart start) {
  switch (start) {
    case ReduceScatterStart::kBySize:
      return "by_size";
    case ReduceScatterStart::kFirstAfterAllGather:
      return "first_after_all_gather";
    case ReduceScatterStart::kFirstAfterNextBackward:
      return "first_after_next_backward";
  }
  return "";
}

/// Gathers share the network's bandwidth with reductions that have a communicator of their own; in one queue the one goes
/// first that is launched first.
ReduceStart ReduceOrder::on_packed(int group, int gathered, ReduceScatterStart start, const GroupStates& groups,
                                   const ExecOrder& order) {
  auto waits = Waits::kForOlder;
  // Groups over other ranks may have other bytes there, by which these would come to another order.
  if (gathered != -1 && groups[group].facts.reduce.is_apart && groups.have_same_ranks()) {
    if (start == ReduceScatterStart::kBySize) {
      if (is_urgent(gathered, groups, order)) waits = Waits::kForUse;
    } else if (!std::exchange(has_shifted_, true)) {
      if (start == ReduceScatterStart::kFirstAfterAllGather && waiting_.empty()) return ReduceStart::kBehindGather;
      waits = start == ReduceScatterStart::kFirstAfterAllGather ? Waits::kForUse : Waits::kForNextBackward;
    }
  }
  if (waits == Waits::kForOlder && waiting_.empty()) return ReduceStart::kNow;
  waiting_.push_back({group, waits, waits == Waits::kForUse ? gathered : -1});
  return ReduceStart::kWaits;
}

size_t ReduceOrder::on_use(std::span<const int> used) {
  size_t count = 0;
  while (!waiting_.empty()) {
    const auto& oldest = waiting_.front();
    if (oldest.waits == Waits::kForNextBackward) break;
    if (oldest.waits == Waits::kForUse && !contains(used, oldest.until)) break;
    waiting_.pop_front();
    ++count;
  }
  return count;
}

size_t ReduceOrder::on_next_backward() {
  for (auto& waiting : waiting_)
    if (waiting.waits == Waits::kForNextBackward) waiting.waits = Waits::kForOlder;
  return on_use({});
}

size_t ReduceOrder::all() {
  const size_t count = waiting_.size();
  waiting_.clear();
  return count;
}

void ReduceOrder::drop(int group) {
  std::erase_if(waiting_, [&](const Waiting& waiting) { return waiting.group == group; });
  for (auto& waiting : waiting_)
    if (waiting.until == group) waiting = {.group = waiting.group, .waits = Waits::kForOlder};
}

bool is_urgent(int gathered, const GroupStates& groups, const ExecOrder& order) {
  int64_t bytes_before = 0;
  // All before it are held, so it is among these.
  const auto& upcoming = order.upcoming(groups.held().size() + 1);
  for (size_t i = 0; i < upcoming.size(); ++i) {
    const int64_t bytes = groups[upcoming[i]].facts.unsharded_bytes;
    // Behind the last gather there are only reductions, and waiting makes them later.
    if (upcoming[i] == gathered) return i + 1 < upcoming.size() && bytes_before < bytes;
    bytes_before += bytes;
  }
  return false;
}

}  // namespace fsdp
