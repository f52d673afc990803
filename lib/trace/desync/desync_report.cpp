#include "trace/desync/desync_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>

namespace fsdp {

namespace {

constexpr uint64_t kShown = 10;

/// Puts a text in one line, whatever a module is called.
std::string one_line(std::string text) {
  std::replace_if(text.begin(), text.end(), [](unsigned char c) { return c < ' '; }, ' ');
  return text;
}

/// Entries [first, end) of a report, as far as it holds them.
std::string numbered(const RankReport& report, uint64_t first, uint64_t end) {
  std::string text;
  for (uint64_t i = std::max(first, report.window.first); i < std::min(end, report.count()); ++i)
    text += fmt::format("\n  {}: {}", i, report.at(i).text);
  return text;
}

std::string what_comes_at(const RankReport& report, uint64_t index) {
  if (report.holds(index)) return report.at(index).text;
  if (index == report.count() && report.window.between.count > 0)
    return fmt::format("{}, which belongs to no group of the model", report.window.between.last);
  if (report.state == RankReport::State::kEnded) return "nothing more, its model is gone";
  return "nothing yet";
}

}  // namespace

std::string RankReport::encode() const {
  std::string text = fmt::format("{} {} {} {} {}\n{}\n{}\n{}\n", rank, static_cast<int>(state), window.first,
                                 window.entries.size(), window.between.count, one_line(waits_for), one_line(where),
                                 one_line(window.between.last));
  for (const auto& entry : window.entries)
    text += fmt::format("{} {} {}\n", entry.hash, entry.between, one_line(entry.text));
  return text;
}

std::optional<RankReport> RankReport::decode(const std::string& text) {
  std::istringstream in(text);
  RankReport report;
  int state = 0;
  size_t entries = 0;
  in >> report.rank >> state >> report.window.first >> entries >> report.window.between.count;
  in.ignore(1);
  std::getline(in, report.waits_for);
  std::getline(in, report.where);
  std::getline(in, report.window.between.last);
  if (!in || state < 0 || state > static_cast<int>(State::kEnded)) return std::nullopt;
  report.state = static_cast<State>(state);
  for (size_t i = 0; i < entries; ++i) {
    CollectiveLog::Described entry;
    in >> entry.hash >> entry.between;
    in.ignore(1);
    std::getline(in, entry.text);
    if (!in) return std::nullopt;
    report.window.entries.push_back(std::move(entry));
  }
  return report;
}

namespace {

/// True if `one` has launched more after its last entry than `other` has before its next one.
bool has_more_between(const RankReport& one, const RankReport& other) {
  return other.holds(one.count()) && other.at(one.count()).between < one.window.between.count;
}

}  // namespace

std::optional<Difference> find_difference(const RankReport& one, const RankReport& other) {
  const uint64_t first = std::max(one.window.first, other.window.first);
  const uint64_t end = std::min(one.count(), other.count());
  // Each hash is over all entries so far: once they differ, they differ for good.
  for (uint64_t i = first; i < end; ++i)
    if (one.at(i).hash != other.at(i).hash) return Difference{i, i == first && first > 0};
  if (has_more_between(one, other) || has_more_between(other, one)) return Difference{end, false};
  return std::nullopt;
}

ScheduleDifference difference_at(std::span<const RankReport> reports, uint64_t index) {
  ScheduleDifference difference{.collective = static_cast<int64_t>(index)};
  for (const auto& report : reports) difference.launched.emplace(report.rank, what_comes_at(report, index));
  return difference;
}

std::optional<Verdict> find_disagreement(std::span<const RankReport> reports) {
  std::optional<Difference> found;
  const RankReport* holder = nullptr;
  for (size_t i = 0; i < reports.size(); ++i)
    for (size_t j = i + 1; j < reports.size(); ++j)
      if (const auto difference = find_difference(reports[i], reports[j]);
          difference && (!found || difference->index < found->index)) {
        found = difference;
        holder = &reports[i];
      }
  if (!found) return std::nullopt;
  auto difference = difference_at(reports, found->index);
  RankLines lines;
  for (const auto& report : reports) lines.add(difference.launched.at(report.rank), report.rank);
  std::string text = fmt::format("the ranks disagree about collective {} of their model{}:{}",
                                 found->index, found->is_older ? ", or one before it" : "", lines.text());
  if (!found->is_older && found->index > 0)
    text += "\nin common before it:" +
            numbered(*holder, found->index - std::min(found->index, kShown), found->index);
  text +=
      "\nAll ranks must use the same modules in the same order and get gradients for the same "
      "parameters; where only the gradients differ, set_reduce_scatter_unused_params(true) lets them";
  return Verdict{std::move(text), std::move(difference)};
}

std::string describe_ranks(std::span<const RankReport> reports, std::span<const int> ranks) {
  RankLines lines;
  const RankReport* longest = nullptr;
  for (const int rank : ranks) {
    const auto report = std::find_if(reports.begin(), reports.end(),
                                     [&](const RankReport& known) { return known.rank == rank; });
    if (report == reports.end()) {
      lines.add("gave no sign", rank);
      continue;
    }
    if (longest == nullptr || report->count() > longest->count()) longest = &*report;
    const auto last = report->count() == 0 ? std::string("no collective launched")
                                           : fmt::format("last launched {}: {}", report->count() - 1,
                                                         report->window.entries.back().text);
    switch (report->state) {
      case RankReport::State::kOutside:
        lines.add(fmt::format("in no collective of this model{}{}; {}", report->where.empty() ? "" : ", ", report->where, last),
                  rank);
        break;
      case RankReport::State::kInCollective:
        lines.add(fmt::format("waits for {}; {}", report->waits_for, last), rank);
        break;
      case RankReport::State::kFailed:
        lines.add("has failed; " + last, rank);
        break;
      case RankReport::State::kEnded:
        lines.add("has ended, its model is gone; " + last, rank);
        break;
    }
  }
  std::string text = lines.text();
  if (longest != nullptr)
    text += fmt::format("\nthe last collectives:{}",
                        numbered(*longest, longest->count() - std::min(longest->count(), kShown),
                                 longest->count()));
  return text;
}

}  // namespace fsdp
