#include "checkpoint/plan/rank_group.hpp"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>

#include "base/stable_hash.hpp"
#include "checkpoint/checkpoint_error.hpp"
#include "comm/watch/awaited_collectives.hpp"
#include "fsdp/process_group.hpp"

namespace fsdp {

namespace {

// What a rank says after its part of the work: nothing, or the kind of its error and the message.
constexpr char kUsage = 'u', kState = 's', kOther = 'o';

std::string outcome_of(const std::function<void()>& body) {
  try {
    body();
    return "";
  } catch (const UsageError& error) {
    return kUsage + std::string(error.what());
  } catch (const StateError& error) {
    return kState + std::string(error.what());
  } catch (const c10::Error& error) {
    return kOther + std::string(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return kOther + std::string(error.what());
  }
}

[[noreturn]] void throw_together(const std::vector<std::string>& outcomes) {
  std::vector<std::pair<std::string, std::vector<size_t>>> messages;
  bool is_usage = true, is_state = true;
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (outcomes[rank].empty()) continue;
    is_usage &= outcomes[rank].front() == kUsage;
    is_state &= outcomes[rank].front() == kState;
    const auto message = outcomes[rank].substr(1);
    auto known = std::find_if(messages.begin(), messages.end(), [&](const auto& m) { return m.first == message; });
    if (known == messages.end()) known = messages.insert(messages.end(), {message, {}});
    known->second.push_back(rank);
  }
  std::string text;
  for (const auto& [message, ranks] : messages) {
    if (!text.empty()) text += "; ";
    text += ranks.size() == outcomes.size() ? message
                                            : fmt::format("rank{} {}: {}", ranks.size() > 1 ? "s" : "", fmt::join(ranks, ", "),
                                                          message);
  }
  if (is_usage) throw UsageError(text);
  if (is_state) throw StateError(text);
  throw CheckpointError(text);
}

}  // namespace

RankGroup::RankGroup(std::shared_ptr<Communicator> world, const char* caller)
    : world_(world ? std::move(world) : is_initialized() ? default_process_group() : single_rank()), caller_(caller) {}

std::vector<std::string> RankGroup::all_gather(const std::string& text) const {
  if (size() == 1) return {text};
  std::vector<int64_t> lengths;
  for (const auto& numbers : all_gather(std::vector{static_cast<int64_t>(text.size())})) lengths.push_back(numbers.front());
  return all_gather(text, lengths);
}

std::vector<std::string> RankGroup::all_gather(const std::string& text, const std::vector<int64_t>& lengths) const {
  if (size() == 1) return {text};
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  std::vector<std::string> texts(size());
  if (longest == 0) return texts;
  auto own = at::zeros({longest}, at::kByte), all = at::empty({size() * longest}, at::kByte);
  std::memcpy(own.mutable_data_ptr(), text.data(), text.size());
  own = own.to(world_->device_type());
  all = all.to(world_->device_type());
  awaited::all_gather(*world_, all, own, caller_);
  all = all.cpu();
  for (int rank = 0; rank < size(); ++rank)
    texts[rank].assign(static_cast<const char*>(all.const_data_ptr()) + rank * longest, lengths[rank]);
  return texts;
}

std::vector<std::string> RankGroup::all_gather_different(const std::string& text) const {
  const auto hash = static_cast<int64_t>(stable_hash(text));
  const auto hashes = all_gather(std::vector{hash});
  if (std::all_of(hashes.begin(), hashes.end(), [&](const auto& other) { return other.front() == hash; })) return {};
  return all_gather(text);
}

std::vector<std::vector<int64_t>> RankGroup::all_gather(const std::vector<int64_t>& numbers) const {
  if (size() == 1) return {numbers};
  const auto count = static_cast<int64_t>(numbers.size());
  std::vector<std::vector<int64_t>> results(size());
  if (count == 0) return results;
  const auto own = at::tensor(numbers, at::kLong).to(world_->device_type());
  auto all = at::empty({size() * count}, own.options());
  awaited::all_gather(*world_, all, own, caller_);
  all = all.cpu();
  const auto* first = all.const_data_ptr<int64_t>();
  for (int rank = 0; rank < size(); ++rank) results[rank].assign(first + rank * count, first + (rank + 1) * count);
  return results;
}

std::string RankGroup::broadcast(const std::string& text) const {
  if (size() == 1) return text;
  const auto length = at::full({1}, static_cast<int64_t>(text.size()), at::kLong).to(world_->device_type());
  awaited::broadcast(*world_, length, 0, caller_);
  auto bytes = at::zeros({length.cpu().item<int64_t>()}, at::kByte);
  if (bytes.numel() == 0) return "";
  if (is_first()) std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  broadcast(bytes);
  return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())};
}

void RankGroup::broadcast(const at::Tensor& bytes) const {
  if (size() == 1 || bytes.numel() == 0) return;
  const auto sent = bytes.to(world_->device_type());
  awaited::broadcast(*world_, sent, 0, caller_);
  if (!sent.is_same(bytes) && !is_first()) bytes.copy_(sent);
}

void RankGroup::together(const std::function<void()>& body) const {
  (void)together_with([&] {
    body();
    return 0;
  });
}

std::vector<int64_t> RankGroup::together_with(const std::function<int64_t()>& body) const {
  int64_t number = 0;
  const auto outcome = outcome_of([&] { number = body(); });
  std::vector<int64_t> lengths, said;
  for (const auto& numbers : all_gather(std::vector{static_cast<int64_t>(outcome.size()), number})) {
    lengths.push_back(numbers[0]);
    said.push_back(numbers[1]);
  }
  const auto outcomes = all_gather(outcome, lengths);
  if (std::any_of(outcomes.begin(), outcomes.end(), [](const auto& text) { return !text.empty(); }))
    throw_together(outcomes);
  return said;
}

void RankGroup::on_first(const std::function<void()>& body) const {
  together([&] {
    if (is_first()) body();
  });
}

}  // namespace fsdp
