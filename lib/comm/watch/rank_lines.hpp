#pragma once

#include <string>
#include <utility>
#include <vector>

namespace fsdp {

/// "rank 3", "ranks 0, 2-5".
std::string list_ranks(std::vector<int> ranks);

/// What ranks have to say: those who say the same stand in one line, in the order of their first.
class RankLines {
 public:
  void add(const std::string& what, int rank);
  /// "\n  rank 0: ...\n  ranks 1, 2: ...".
  std::string text() const;

 private:
  std::vector<std::pair<std::string, std::vector<int>>> lines_;
};

}  // namespace fsdp
