#include "comm/watch/rank_lines.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace fsdp {

std::string list_ranks(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  std::vector<std::string> runs;
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    runs.push_back(last == i ? fmt::format("{}", ranks[i])
                             : fmt::format("{}{}{}", ranks[i], last == i + 1 ? ", " : "-", ranks[last]));
    i = last + 1;
  }
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(runs, ", "));
}

void RankLines::add(const std::string& what, int rank) {
  const auto known = std::find_if(lines_.begin(), lines_.end(), [&](const auto& line) { return line.first == what; });
  if (known != lines_.end())
    known->second.push_back(rank);
  else
    lines_.push_back({what, {rank}});
}

std::string RankLines::text() const {
  std::string text;
  for (const auto& [what, ranks] : lines_) text += fmt::format("\n  {}: {}", list_ranks(ranks), what);
  return text;
}

}  // namespace fsdp
